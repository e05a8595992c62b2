from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.config import load_config
from tandem.config.verl_names import answer
from tandem.errors import ConfigError

ENOUGH = ("model.path=Qwen/Qwen3-0.6B", "data.train=train.parquet", "reward.function=exact_match")
ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
CORRECTION = "algorithm.rollout_correction."
OVERLONG_BUFFERS = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
IN_REWARD = {"algorithm.use_kl_in_reward": True}


@pytest.mark.parametrize(
    ("key", "value", "settings"),
    [
        ("data.train_files", "a.parquet", {"data.train": "a.parquet"}),
        ("data.train_files", ["a.parquet"], {"data.train": "a.parquet"}),
        (
            "data.train_files",
            ["a", "b"],
            {"data.train": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 1.0}]},
        ),
        ("data.val_files", "t.parquet", {"evaluation.data": "t.parquet"}),
        ("data.train_batch_size", 1024, {"data.prompts_per_step": 1024}),
        ("data.max_response_length", 512, {"rollout.max_response_length": 512}),
        ("data.truncation", "left", {"data.over_length": "left"}),
        ("data.filter_overlong_prompts", True, {"data.over_length": "filter"}),
        ("data.filter_overlong_prompts", False, {"data.over_length": "error"}),
        ("data.seed", 3, {"run.seed": 3}),
        ("data.train_max_samples", -1, {"data.max_rows": None}),
        ("data.train_max_samples", 100, {"data.max_rows": 100}),
        ("data.apply_chat_template_kwargs", {"x": 1}, {"data.chat_template_options": {"x": 1}}),
        (f"{CORRECTION}rollout_is", None, {"algorithm.correction": "none"}),
        (f"{CORRECTION}rollout_is", "token", {"algorithm.correction": "token_tis"}),
        (f"{CORRECTION}rollout_is", "sequence", {"algorithm.correction": "sequence_tis"}),
        (f"{CORRECTION}rollout_is_threshold", 3.0, {"algorithm.correction_range": [0.0, 3.0]}),
        (f"{CORRECTION}rollout_is_threshold", "0.5_2.0", {"algorithm.correction_range": [0.5, 2.0]}),
        (f"{CORRECTION}rollout_is_threshold", "wide", {}),
        (f"{CORRECTION}rollout_rs", None, {}),
        (f"{CORRECTION}rollout_rs", "seq_sum_k1", {"algorithm.correction": "sequence_mask"}),
        (f"{CORRECTION}rollout_rs", "seq_mean_k3", {}),
        (f"{CORRECTION}rollout_rs_threshold", "0.95_1.05", {"algorithm.correction_range": [0.95, 1.05]}),
        (f"{CORRECTION}bypass_mode", True, {"algorithm.old_logprobs": "rollout"}),
        (f"{MODEL}path", "m", {"model.path": "m"}),
        (f"{MODEL}trust_remote_code", True, {"model.trust_remote_code": True}),
        (f"{MODEL}enable_gradient_checkpointing", True, {"trainer.activation_checkpointing": True}),
        (f"{MODEL}use_remove_padding", True, {"trainer.packing": "varlen"}),
        (f"{ACTOR}ppo_mini_batch_size", 64, {"trainer.mini_batch_responses": 512}),
        (f"{ACTOR}ppo_max_token_len_per_gpu", 16384, {"trainer.micro_batch_tokens": 16384}),
        (f"{ACTOR}ppo_epochs", 2, {"trainer.update_epochs": 2}),
        (f"{ACTOR}clip_ratio", 0.2, {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}),
        (f"{ACTOR}clip_ratio_low", 0.1, {"algorithm.clip_low": 0.1}),
        (f"{ACTOR}clip_ratio_high", 0.28, {"algorithm.clip_high": 0.28}),
        (f"{ACTOR}clip_ratio_c", 3.0, {"algorithm.clip_dual": 3.0}),
        (f"{ACTOR}loss_agg_mode", "token-mean", {"algorithm.loss_aggregation": "token_mean"}),
        (f"{ACTOR}loss_agg_mode", "seq-mean-token-mean", {"algorithm.loss_aggregation": "sequence_mean"}),
        (f"{ACTOR}loss_agg_mode", "seq-mean-token-sum", {"algorithm.loss_aggregation": "sequence_sum"}),
        (f"{ACTOR}loss_agg_mode", "seq-mean-token-sum-norm", {"algorithm.loss_aggregation": "constant"}),
        (f"{ACTOR}entropy_coeff", 0.001, {"algorithm.entropy_coef": 0.001}),
        (f"{ACTOR}kl_loss_coef", 0.001, {"algorithm.kl_coef": 0.0}),
        (f"{ACTOR}kl_loss_type", "low_var_kl", {"algorithm.kl_estimator": "k3"}),
        (f"{ACTOR}optim.lr", 1e-6, {"trainer.lr": 1e-6}),
        (f"{ACTOR}optim.lr_warmup_steps", -1, {"trainer.warmup_steps": 0}),
        (f"{ACTOR}optim.weight_decay", 0.01, {"trainer.weight_decay": 0.01}),
        (f"{ACTOR}optim.clip_grad", 1.0, {"trainer.max_grad_norm": 1.0}),
        (f"{ROLLOUT}n", 5, {"rollout.n": 5}),
        (f"{ROLLOUT}temperature", 0.7, {"rollout.temperature": 0.7}),
        (f"{ROLLOUT}top_p", 0.9, {"rollout.top_p": 0.9}),
        (f"{ROLLOUT}top_k", -1, {"rollout.top_k": None}),
        (f"{ROLLOUT}max_num_seqs", 256, {"rollout.max_concurrent": 256}),
        (f"{ROLLOUT}tensor_model_parallel_size", 2, {"rollout.tensor_parallel": 2}),
        (f"{ACTOR}fsdp_config.param_offload", True, {"trainer.offload": "host"}),
        (f"{ACTOR}fsdp_config.optimizer_offload", False, {"trainer.offload": "none"}),
        (f"{ACTOR}fsdp_config.fsdp_size", -1, {"trainer.replicas": 1}),
        (f"{ACTOR}fsdp_config.fsdp_size", 4, {"trainer.replicas": 2}),
        ("trainer.n_gpus_per_node", 4, {"cluster.num_workers": 4}),
        ("trainer.nnodes", 2, {"cluster.num_workers": 16}),
        (f"{ROLLOUT}val_kwargs.n", 4, {"evaluation.n": 4}),
        (f"{ROLLOUT}val_kwargs.temperature", 0, {"evaluation.temperature": 0}),
        (f"{MODEL}lora_rank", 32, {"model.lora_rank": 32}),
        (f"{MODEL}lora_alpha", 16, {"model.lora_alpha": 16}),
        (f"{MODEL}target_modules", "all-linear", {"model.lora_targets": "all-linear"}),
        (f"{ACTOR}policy_loss.loss_mode", "vanilla", {"algorithm.loss": "ppo_clip"}),
        (f"{ACTOR}policy_loss.loss_mode", "gspo", {"algorithm.loss": "gspo"}),
        ("algorithm.adv_estimator", "gae", {"algorithm.advantage": "gae"}),
        ("algorithm.adv_estimator", "rloo_vectorized", {"algorithm.advantage": "rloo"}),
        ("algorithm.gamma", 0.99, {"algorithm.gamma": 0.99}),
        ("algorithm.lam", 0.95, {"algorithm.lam": 0.95}),
        ("algorithm.use_kl_in_reward", True, {"algorithm.kl_place": "reward"}),
        ("algorithm.use_kl_in_reward", False, {"algorithm.kl_place": "loss"}),
        ("algorithm.filter_groups.enable", True, {"algorithm.idle_groups": "resample"}),
        ("algorithm.filter_groups.max_num_gen_batches", 10, {"algorithm.max_resample": 10}),
        *[
            (f"{buffer}.{name}", value, settings)
            for buffer in OVERLONG_BUFFERS
            for name, value, settings in (
                ("enable", False, {"reward.overlong_buffer": 0}),
                ("len", 4096, {"reward.overlong_buffer": 4096}),
                ("penalty_factor", 1.0, {"reward.overlong_penalty": 1.0}),
            )
        ],
        ("critic.model.path", "m", {"critic.path": "m"}),
        ("critic.optim.lr", 1e-5, {"critic.lr": 1e-5}),
        ("critic.cliprange_value", 0.5, {"critic.clip_value": 0.5}),
        ("trainer.critic_warmup", 20, {"critic.warmup_steps": 20}),
        ("algorithm.norm_adv_by_std_in_grpo", True, {"algorithm.normalize_std": "group"}),
        ("algorithm.norm_adv_by_std_in_grpo", False, {"algorithm.normalize_std": "none"}),
        ("custom_reward_function.path", "r.py", {"reward.function": "r.py:compute_score"}),
        ("reward.custom_reward_function.path", "r.py", {"reward.function": "r.py:compute_score"}),
        ("trainer.total_epochs", 15, {"data.epochs": 15}),
        ("trainer.total_training_steps", 100, {"run.steps": 100}),
        ("trainer.save_freq", -1, {"checkpoint.every": 0}),
        ("trainer.test_freq", 5, {"evaluation.every": 5}),
        ("trainer.logger", ["console", "wandb"], {"tracking.to": ["wandb"]}),
        ("trainer.default_local_dir", "d", {"run.folder": "d"}),
    ],
)
def test_a_key_of_verl_has_its_counterpart_and_value(key: str, value: Any, settings: dict[str, Any]):
    found = answer(key, value, {})
    assert found is not None
    assert found.settings == settings


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        (f"{ROLLOUT}mode", "async", "engines work in the workers"),
        (f"{ROLLOUT}gpu_memory_utilization", 0.5, "see rollout.kv_cache_gib, in GiB"),
        ("algorithm.adv_estimator", "opo", "see examples/losses/opo.py"),
        ("algorithm.adv_estimator", "mine", "see algorithm.advantage, which takes grpo, rloo, remax, gae"),
        ("algorithm.kl_ctrl.kl_coef", 0.001, "without algorithm.use_kl_in_reward=true verl ignores it"),
        ("algorithm.kl_penalty", "mse", "without algorithm.use_kl_in_reward=true verl ignores it"),
        ("algorithm.kl_ctrl.type", "adaptive", "see examples/losses/adaptive_kl.py"),
        ("reward_model.overlong_buffer.enable", True, "on where reward.overlong_buffer is above 0"),
        ("reward_model.reward_kwargs.max_resp_len", 20480, "rollout.max_response_length holds here, too"),
        ("reward.reward_kwargs.overlong_buffer_cfg.log", True, "no counterpart"),
        ("critic.ppo_epochs", 2, "cut like the policy's"),
        ("critic.ulysses_sequence_parallel_size", 2, "no counterpart"),
        ("trainer.n_gpus_per_node", "all", "see cluster.num_workers, the GPUs of all nodes together"),
        (f"{ACTOR}fsdp_config.fsdp_size", 3, "cluster.num_workers / fsdp_size"),
        (f"{ACTOR}fsdp_config.fsdp_size", 0, "cluster.num_workers / fsdp_size"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", True, "trainer.offload holds for the reference, too"),
        ("trainer.balance_batch", True, "spread over the workers by their cost"),
        (f"{ACTOR}policy_loss.loss_mode", "geo_mean", "see examples/losses/gmpo.py: you pass the function to td.train"),
        (f"{ACTOR}policy_loss.loss_mode", "clip_cov", "see examples/losses/clip_cov.py: for a loop of your own"),
        (f"{ACTOR}policy_loss.loss_mode", "kl_cov", "see examples/losses/kl_cov.py: for a loop of your own"),
        (f"{ACTOR}optim.lr", "${x.lr}", "no interpolation here: write trainer.lr with the value itself"),
        (f"{ACTOR}loss_agg_mode", "other", "see algorithm.loss_aggregation, which takes token_mean"),
    ],
)
def test_a_key_without_counterpart_says_so(key: str, value: Any, note: str):
    found = answer(key, value, {})
    assert found is not None
    assert found.settings == {}
    assert note in found.note


@pytest.mark.parametrize(
    ("key", "value", "given", "settings"),
    [
        (f"{ACTOR}ppo_mini_batch_size", 64, {"rollout.n": 4}, {"trainer.mini_batch_responses": 256}),
        (f"{ACTOR}ppo_mini_batch_size", 64, {f"{ROLLOUT}n": 5}, {"trainer.mini_batch_responses": 320}),
        (f"{ACTOR}kl_loss_coef", 0.001, {f"{ACTOR}use_kl_loss": True}, {"algorithm.kl_coef": 0.001}),
        (f"{ACTOR}kl_loss_coef", 0.001, IN_REWARD, {}),
        (f"{ACTOR}use_kl_loss", False, IN_REWARD, {}),
        ("algorithm.kl_ctrl.kl_coef", 0.001, IN_REWARD, {"algorithm.kl_coef": 0.001}),
        ("algorithm.kl_penalty", "kl", IN_REWARD, {"algorithm.kl_estimator": "k1"}),
        ("trainer.n_gpus_per_node", 4, {"trainer.nnodes": 2}, {"cluster.num_workers": 8}),
        ("trainer.nnodes", 2, {"trainer.n_gpus_per_node": 4}, {"cluster.num_workers": 8}),
        (f"{ACTOR}fsdp_config.fsdp_size", 4, {"trainer.nnodes": 2}, {"trainer.replicas": 4}),
        (f"{ACTOR}fsdp_config.fsdp_size", 2, {"cluster.num_workers": 4}, {"trainer.replicas": 2}),
        (
            f"{ACTOR}fsdp_config.param_offload",
            False,
            {f"{ACTOR}fsdp_config.optimizer_offload": True},
            {"trainer.offload": "host"},
        ),
        (f"{ACTOR}optim.lr_warmup_steps_ratio", 0.1, {"run.steps": 200}, {"trainer.warmup_steps": 20}),
        (
            "custom_reward_function.path",
            "r.py",
            {"custom_reward_function.name": "score"},
            {"reward.function": "r.py:score"},
        ),
        ("data.truncation", "error", {"data.filter_overlong_prompts": True}, {}),
    ],
)
def test_a_value_that_depends_on_others_is_converted_with_them(
    key: str, value: Any, given: dict[str, Any], settings: dict[str, Any]
):
    found = answer(key, value, given)
    assert found is not None
    assert found.settings == settings


def test_every_answer_leads_to_keys_and_values_that_the_config_takes():
    overrides = [
        "data.train_batch_size=64",
        "+data.filter_overlong_prompts=True",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.actor.kl_loss_type=mse",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=8",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "algorithm.norm_adv_by_std_in_grpo=True",
        "trainer.logger=[console, tensorboard]",
        "trainer.save_freq=-1",
        "trainer.n_gpus_per_node=8",
        "trainer.nnodes=2",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*ENOUGH, *overrides])
    assert len(caught.value.problems) == len(overrides)
    remedies = [problem.remedy or "" for problem in caught.value.problems]
    ours = [remedy.removeprefix("write ").partition(" (")[0] for remedy in remedies if remedy.startswith("write ")]
    assert len(ours) == len(overrides) - 1  # use_kl_loss goes away
    config = load_config(None, [*ENOUGH, *ours])
    assert config.trainer.mini_batch_responses == 64
    assert (config.algorithm.kl_coef, config.algorithm.kl_estimator) == (0.001, "k2")
    assert (config.cluster.num_workers, config.rollout.tensor_parallel, config.trainer.replicas) == (16, 2, 2)


def test_a_file_of_verl_is_answered_key_by_key_with_its_lines(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "actor_rollout_ref:\n"
        "  model:\n"
        "    path: Qwen/Qwen3-0.6B\n"
        "  actor:\n"
        "    ppo_mini_batch_size: 64\n"
        "  rollout: {n: 8, unheard_of: 1}\n"
        "data:\n"
        "  train_files: a.parquet\n"
        "  apply_chat_template_kwargs: {enable_thinking: false}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, need_reward=False)
    messages = [str(problem).replace(str(path), "run.yaml") for problem in caught.value.problems]
    assert messages == [
        "run.yaml:3: actor_rollout_ref.model.path: is verl's name (given: Qwen/Qwen3-0.6B)\n"
        "      -> write model.path=Qwen/Qwen3-0.6B",
        "run.yaml:5: actor_rollout_ref.actor.ppo_mini_batch_size: is verl's name (given: 64)\n"
        "      -> write trainer.mini_batch_responses=512 (verl counts 64 prompts, Tandem counts 64 x 8 responses)",
        "run.yaml:6: actor_rollout_ref.rollout.n: is verl's name (given: 8)\n      -> write rollout.n=8",
        "run.yaml:6: actor_rollout_ref.rollout.unheard_of: is verl's name (given: 1)\n"
        "      -> Tandem has no counterpart: leave the key out (`tandem config` lists all options)",
        "run.yaml:8: data.train_files: is verl's name (given: a.parquet)\n      -> write data.train=a.parquet",
        "run.yaml:9: data.apply_chat_template_kwargs: is verl's name (given: {enable_thinking: false})\n"
        "      -> write data.chat_template_options={enable_thinking: false}",
    ]


def test_a_name_that_is_nobodys_gets_no_answer():
    assert answer("data.nonsense", 1, {}) is None
