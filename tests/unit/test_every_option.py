"""Contract 8: every option changes something that a test sees. Here stands, for each, which test that is."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tandem.config import leaf_keys
from tests.loop.test_options_change_a_run import CASES

TESTS = Path(__file__).parents[1]

POOL = "unit/rewards/test_reward_pool.py"
FAULTS = "unit/rewards/test_reward_pool_faults.py"
WORKER = "unit/hybrid/test_options_reach_the_worker.py"
RUN = "unit/observe/test_run.py"
RANKS = "loop/test_ranks.py"

SHOWN_BY: dict[str, str] = {
    **dict.fromkeys(CASES, "loop/test_options_change_a_run.py::test_the_option_changes_the_run"),
    "run.folder": "unit/observe/test_folder.py::test_a_new_folder_gets_the_resolved_config",
    "run.allow_changes": "loop/test_going_on.py::test_allowed_changes_take_effect_and_are_written_down",
    "model.trust_remote_code": "unit/model/test_facts.py::test_code_shipped_with_a_model_is_run_on_request",
    "model.attention": f"{WORKER}::test_attention_is_computed_as_the_config_says",
    "rollout.engine": "unit/config/test_resolve.py::test_the_engine_is_vllm_where_it_is_installed_and_there_is_a_gpu",
    "rollout.vllm_options": "contract/test_vllm_options.py::test_vllm_options_reach_vllm",
    "rollout.max_concurrent": f"{WORKER}::test_max_concurrent_decides_how_many_responses_are_written_at_once",
    "rollout.kv_cache_gib": f"{WORKER}::test_kv_cache_gib_bounds_the_cache_and_too_little_is_told",
    "rollout.tensor_parallel": f"{RANKS}::test_tensor_parallel_ranks_sample_like_one",
    "reward.batched": f"{POOL}::test_a_batched_function_is_called_once_for_each_worker",
    "reward.workers": f"{POOL}::test_all_workers_work",
    "reward.concurrency": f"{POOL}::test_concurrency_is_the_limit_over_all_workers",
    "reward.timeout_s": f"{FAULTS}::test_the_time_limit_starts_with_the_function_not_in_the_queue",
    "reward.memory_gib": f"{FAULTS}::test_fault_31_and_32_a_bad_call_costs_one_score_only",
    "reward.max_invalid_share": "loop/test_reward_faults.py::test_max_invalid_share_moves_the_limit",
    "algorithm.old_logprobs": "unit/hybrid/test_phases.py::test_old_logprobs_come_from_where_the_config_says",
    "algorithm.mismatch_stop": f"{RUN}::test_mismatch_stop_ends_the_run_and_below_it_there_is_a_warning",
    "trainer.micro_batch_tokens": f"{WORKER}::test_micro_batch_tokens_bounds_the_tokens_of_a_pass",
    "trainer.packing": f"{WORKER}::test_packing_decides_how_often_a_prompt_is_run",
    "trainer.logits_chunk_tokens": f"{WORKER}::test_logits_chunk_tokens_bounds_the_logits_in_memory",
    "trainer.activation_checkpointing": f"{WORKER}::test_activation_checkpointing_runs_the_layers_again",
    "trainer.replicas": f"{RANKS}::test_replicas_hold_equal_shards",
    "trainer.offload": f"{RANKS}::test_offload_frees_memory_between_the_phases",
    "trainer.max_skipped_updates": f"{WORKER}::test_max_skipped_updates_stops_training",
    "cluster.num_workers": f"{RANKS}::test_num_workers_ranks_train_like_one",
    "cluster.address": "loop/test_two_nodes.py::test_a_run_joins_a_cluster",
    "cluster.max_failures": "loop/test_failures.py::test_after_max_failures_the_run_stops_with_the_workers_error",
    "cluster.device": f"{WORKER}::test_the_device_is_where_the_weights_are",
    "cluster.deterministic": f"{WORKER}::test_threads_and_determinism_hold_while_the_worker_works",
    "cluster.threads": f"{WORKER}::test_threads_and_determinism_hold_while_the_worker_works",
    "checkpoint.every": f"{RUN}::test_checkpoints_fall_due_every_so_often_and_at_the_end",
    "checkpoint.keep": "loop/test_export.py::test_the_best_checkpoint_is_kept_beside_the_newest",
    "checkpoint.keep_best": "loop/test_export.py::test_the_best_checkpoint_is_kept_beside_the_newest",
    "checkpoint.background": "unit/test_checkpoint_background.py::test_in_the_background_the_run_goes_on_meanwhile",
    "evaluation.metric": "unit/observe/test_best.py::test_a_run_that_goes_on_by_another_metric_has_no_best_yet",
    "evaluation.patience": "loop/test_export.py::test_patience_ends_a_run_and_more_of_it_goes_on",
    "tracking.to": "unit/observe/test_trackers.py::test_tensorboard_gets_the_metrics_under_verls_names",
    "tracking.project": "unit/observe/test_tracker_project.py::test_the_project_is_the_one_of_the_config",
    "tracking.names": "unit/observe/test_trackers.py::test_tensorboard_gets_the_metrics_under_verls_names",
    "tracking.rollouts_every": f"{RUN}::test_rollouts_every_and_rollouts_max",
    "tracking.rollouts_max": f"{RUN}::test_rollouts_every_and_rollouts_max",
}


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_there_is_a_test_for_every_option_and_no_other() -> None:
    assert set(SHOWN_BY) == set(leaf_keys())


@pytest.mark.parametrize("key", SHOWN_BY)
def test_the_test_is_there(key: str) -> None:
    path, _, name = SHOWN_BY[key].partition("::")
    assert name in functions_of(TESTS / path), f"{key}: there is no {SHOWN_BY[key]}"
