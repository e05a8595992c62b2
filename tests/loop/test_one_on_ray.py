"""Contract 6: one rank in this process and one rank on Ray give the same responses, weights and moments, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

import tandem as td
from tandem.checkpoint import find_checkpoint
from tandem.config.cluster import ClusterConfig
from tandem.hybrid.start import MakeGroup, _compute_settings, _start, resolve_here
from tandem.hybrid.worker import Worker
from tandem.model.ranks import Ranks
from tandem.runtime.ray import RayGroup
from tests.loop.small_run import exit_code, start_function
from tests.tiny import tiny_model_folder
from tests.unit.hybrid.made import contrast, rollout

STEPS = 2


def on_ray(cluster: ClusterConfig, make_worker: Callable[[Ranks], Worker]) -> RayGroup[Worker]:
    return RayGroup(make_worker, _compute_settings(cluster), num_workers=1, device_type="cpu")


def two_steps(model: Path, run_folder: Path, make_group: MakeGroup | None) -> dict[str, list[object]]:
    """What was sampled and its log-probs; weights and moments at the end."""
    sections = {
        "model": {"path": str(model)},
        "data": {"max_prompt_length": 64},
        "rollout": {"max_concurrent": 8, "max_response_length": 8},
        "trainer": {"lr": 1e-2, "warmup_steps": 0, "mini_batch_responses": 4},
        "algorithm": {"kl_coef": 0.1},
        "cluster": {"threads": 2, "deterministic": True},  # Ray gives its processes one thread
    }
    config = resolve_here(td.config_from_dict(sections, need_data=False, need_reward=False))
    found: dict[str, list[object]] = {}
    with _start(config, run_folder=run_folder, total_steps=None, make_group=make_group) as workers:
        for step in range(1, STEPS + 1):
            rollouts = rollout(workers, step=step)
            with workers.train_phase() as trainer:
                reference = trainer.ref_logprobs(rollouts)
                update = trainer.update(rollouts, contrast(rollouts), ref_logprobs=reference)
            assert update.num_updates == len(rollouts) / 4
            found[f"responses {step}"] = rollouts.response_tokens.tolist()
            found[f"log-probs {step}"] = rollouts.rollout_logprobs.tolist()
        workers.save_checkpoint(STEPS, {})
    checkpoint = find_checkpoint(run_folder)
    assert checkpoint is not None
    for file in sorted(checkpoint.rglob("*.safetensors")):
        found |= {name: tensor.tolist() for name, tensor in load_file(file).items()}
    return found


def two_steps_on_ray(model: Path, run_folder: Path, result: Path) -> None:
    result.write_text(json.dumps(two_steps(model, run_folder, on_ray)))


@pytest.mark.slow
def test_one_rank_on_ray_is_one_in_this_process(tmp_path: Path) -> None:
    model = tiny_model_folder(tmp_path / "model")
    here = two_steps(model, tmp_path / "here", None)
    log, result = tmp_path / "log", tmp_path / "result"
    assert exit_code(start_function(two_steps_on_ray, log, model, tmp_path / "there", result)) == 0, log.read_text()
    there = json.loads(result.read_text())
    assert [name for name in here if here[name] != there[name]] == []
    assert here.keys() == there.keys()
    before = load_file(model / "model.safetensors")
    assert all(here[name] != tensor.tolist() for name, tensor in before.items()), "nothing was trained"
    assert any(name.startswith("exp_avg_sq.") for name in here)
