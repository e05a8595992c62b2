from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config import Config, load_config, resolve_config, to_yaml
from tandem.config.presets import PRESETS
from tandem.errors import ConfigError

ENOUGH = ("model.path=Qwen/Qwen3-0.6B", "data.train=train.parquet", "reward.function=exact_match")


def resolved(*overrides: str, has_cuda: bool = False) -> Config:
    return resolve_config(load_config(None, [*ENOUGH, *overrides]), num_cpus=4, has_cuda=has_cuda, name="sums")


def test_on_a_cpu_everything_is_exact():
    config = resolved()
    assert (config.cluster.device, config.cluster.deterministic, config.cluster.threads) == ("cpu", True, 4)
    assert (config.model.dtype, config.model.attention) == ("float32", "sdpa")
    assert config.run.folder == "runs/sums"


def test_a_run_folder_in_the_home_folder():
    assert resolved("run.folder=~/runs/sums").run.folder == str(Path.home() / "runs" / "sums")


def test_on_a_gpu_the_computation_is_in_bfloat16():
    config = resolved(has_cuda=True)
    assert (config.cluster.device, config.cluster.deterministic, config.model.dtype) == ("cuda", False, "bfloat16")


def test_what_is_given_stays():
    overrides = ("cluster.device=cpu", "cluster.threads=1", "cluster.deterministic=false", "run.folder=here")
    config = resolved(*overrides, "model.dtype=bfloat16", "model.attention=eager", has_cuda=True)
    assert (config.cluster.device, config.cluster.threads, config.cluster.deterministic) == ("cpu", 1, False)
    assert (config.model.dtype, config.model.attention, config.run.folder) == ("bfloat16", "eager", "here")


@pytest.mark.parametrize(
    ("overrides", "has_cuda", "choice"),
    [
        ([], False, "update"),
        ([], True, "update"),
        (["trainer.update_epochs=2"], False, "rollout"),
        (["trainer.mini_batch_responses=64"], False, "rollout"),
        (["trainer.update_epochs=2"], True, "recompute"),
        (["trainer.update_epochs=2", "model.dtype=float32"], True, "rollout"),
        (["trainer.update_epochs=2", "model.head_dtype=bfloat16"], False, "recompute"),
        (["rollout.top_p=0.9"], False, "recompute"),
        (["rollout.top_k=20", "trainer.update_epochs=2"], False, "recompute"),
        (["algorithm.old_logprobs=recompute"], False, "recompute"),
    ],
)
def test_old_logprobs_come_from_the_cheapest_exact_place(overrides: list[str], has_cuda: bool, choice: str):
    assert resolved(*overrides, has_cuda=has_cuda).algorithm.old_logprobs == choice


def test_what_only_the_machine_shows_is_refused_then():
    with pytest.raises(ConfigError, match="there is no CUDA device"):
        resolved("cluster.device=cuda")
    with pytest.raises(ConfigError, match="in bfloat16"):
        resolved("algorithm.old_logprobs=rollout", has_cuda=True)
    assert resolved("algorithm.old_logprobs=rollout").algorithm.old_logprobs == "rollout"


@pytest.mark.parametrize("preset", [*PRESETS, "null"])
@pytest.mark.parametrize("has_cuda", [False, True])
def test_a_resolved_config_survives_writing_and_reading_and_is_decided(preset: str, has_cuda: bool, tmp_path: Path):
    config = resolved(f"algorithm.preset={preset}", "trainer.mini_batch_responses=null", has_cuda=has_cuda)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config
    assert resolve_config(load_config(path), num_cpus=1, has_cuda=has_cuda) == config
