from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config import Config, load_config, resolve_config, to_yaml
from tandem.config.presets import PRESETS
from tandem.errors import ConfigError

KL = ("algorithm.kl_coef=0.1",)
ENOUGH = ("model.path=Qwen/Qwen3-0.6B", "data.train=train.parquet", "reward.function=exact_match")


def resolved(*overrides: str, num_gpus: int = 0, num_cpus: int = 4) -> Config:
    config = load_config(None, [*ENOUGH, *overrides])
    return resolve_config(config, num_cpus=num_cpus, num_gpus=num_gpus, name="sums")


def test_on_a_cpu_everything_is_exact():
    config = resolved()
    assert (config.cluster.device, config.cluster.deterministic, config.cluster.threads) == ("cpu", True, 4)
    assert (config.model.dtype, config.model.attention) == ("float32", "sdpa")
    assert config.run.folder == "runs/sums"


def test_a_run_folder_in_the_home_folder():
    assert resolved("run.folder=~/runs/sums").run.folder == str(Path.home() / "runs" / "sums")


def test_on_a_gpu_the_computation_is_in_bfloat16():
    config = resolved(num_gpus=1)
    assert (config.cluster.device, config.cluster.deterministic, config.model.dtype) == ("cuda", False, "bfloat16")


@pytest.mark.parametrize(
    ("override", "num_gpus", "has_vllm", "choice"),
    [
        ("rollout.engine=auto", 1, True, "vllm"),
        ("rollout.engine=auto", 1, False, "embedded"),
        ("rollout.engine=auto", 0, True, "embedded"),
        ("rollout.engine=embedded", 1, True, "embedded"),
        ("rollout.engine=vllm", 0, False, "vllm"),  # whoever starts it says that it is missing
    ],
)
def test_the_engine_is_vllm_where_it_is_installed_and_there_is_a_gpu(override, num_gpus, has_vllm, choice):
    config = load_config(None, [*ENOUGH, override])
    config = resolve_config(config, num_cpus=4, num_gpus=num_gpus, has_vllm=has_vllm)
    assert config.rollout.engine == choice
    assert f"engine: {choice}" in to_yaml(config)


def test_vllm_options_need_vllm():
    with pytest.raises(ConfigError, match=r"rollout\.vllm_options: has no effect: rollout\.engine is embedded"):
        resolved("rollout.vllm_options={block_size: 64}")


def test_with_vllm_old_logprobs_are_recomputed():
    updates = "trainer.update_epochs=2"
    assert resolved(updates, "rollout.engine=vllm").algorithm.old_logprobs == "recompute"
    assert resolved(updates, "rollout.engine=embedded").algorithm.old_logprobs == "rollout"


def test_what_is_given_stays():
    overrides = ("cluster.device=cpu", "cluster.threads=1", "cluster.deterministic=false", "run.folder=here")
    config = resolved(*overrides, "model.dtype=bfloat16", "model.attention=eager", num_gpus=1)
    assert (config.cluster.device, config.cluster.threads, config.cluster.deterministic) == ("cpu", 1, False)
    assert (config.model.dtype, config.model.attention, config.run.folder) == ("bfloat16", "eager", "here")


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "choice"),
    [
        ([], 0, "update"),
        ([], 1, "update"),
        (["trainer.update_epochs=2"], 0, "rollout"),
        (["trainer.mini_batch_responses=64"], 0, "rollout"),
        (["trainer.update_epochs=2"], 1, "recompute"),
        (["trainer.update_epochs=2", "model.dtype=float32"], 1, "rollout"),
        (["trainer.update_epochs=2", "model.head_dtype=bfloat16"], 0, "recompute"),
        (["rollout.top_p=0.9"], 0, "recompute"),
        (["rollout.top_k=20", "trainer.update_epochs=2"], 0, "recompute"),
        (["algorithm.old_logprobs=recompute"], 0, "recompute"),
        (["trainer.update_epochs=2", "algorithm.correction=none"], 0, "rollout"),
        (["trainer.update_epochs=2", "algorithm.correction=token_mask"], 0, "recompute"),
        (["algorithm.correction=token_mask"], 0, "update"),
        ([*KL, "algorithm.kl_place=loss"], 0, "update"),
        ([*KL, "algorithm.kl_place=reward"], 0, "rollout"),
        ([*KL, "algorithm.kl_place=reward"], 1, "recompute"),
        ([*KL, "algorithm.kl_place=reward", "algorithm.correction=token_mask"], 0, "recompute"),
    ],
)
def test_old_logprobs_come_from_the_cheapest_exact_place(overrides: list[str], num_gpus: int, choice: str):
    assert resolved(*overrides, num_gpus=num_gpus).algorithm.old_logprobs == choice


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "choice"),
    [
        ([], 0, "none"),
        ([], 1, "token_tis"),
        (["trainer.update_epochs=2"], 1, "token_tis"),
        (["model.dtype=bfloat16"], 0, "token_tis"),
        (["model.head_dtype=bfloat16"], 0, "token_tis"),
        (["model.dtype=float32"], 1, "none"),
        (["model.dtype=float32", "algorithm.correction=sequence_tis"], 1, "sequence_tis"),
        (["algorithm.old_logprobs=rollout"], 0, "none"),
        (["algorithm.correction=none"], 1, "none"),
        (["rollout.engine=vllm"], 0, "token_tis"),
        (["rollout.engine=vllm", "rollout.top_p=0.9"], 1, "none"),
        (["rollout.engine=embedded", "rollout.top_p=0.9"], 1, "token_tis"),
    ],
)
def test_an_engine_that_is_not_exact_is_corrected(overrides: list[str], num_gpus: int, choice: str):
    assert resolved(*overrides, num_gpus=num_gpus).algorithm.correction == choice


def test_what_only_the_machine_shows_is_refused_then():
    with pytest.raises(ConfigError, match="there is no CUDA device"):
        resolved("cluster.device=cuda")
    with pytest.raises(ConfigError, match="in bfloat16"):
        resolved("algorithm.old_logprobs=rollout", num_gpus=1)
    assert resolved("algorithm.old_logprobs=rollout").algorithm.old_logprobs == "rollout"
    with pytest.raises(
        ConfigError, match=r"correction_range: is \[0\.5, 2\.0\], but with algorithm\.correction=token_tis"
    ):
        resolved("algorithm.correction_range=[0.5, 2.0]", num_gpus=1)


@pytest.mark.parametrize("preset", [*PRESETS, "null"])
@pytest.mark.parametrize("num_gpus", [0, 1])
def test_a_resolved_config_survives_writing_and_reading_and_is_decided(preset: str, num_gpus: int, tmp_path: Path):
    config = resolved(f"algorithm.preset={preset}", "trainer.mini_batch_responses=null", num_gpus=num_gpus)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config
    assert resolve_config(load_config(path), num_cpus=1, num_gpus=num_gpus) == config


def test_the_workers_of_a_machine_share_its_cpus():
    assert resolved("cluster.num_workers=2").cluster.threads == 2
    assert resolved("cluster.num_workers=3").cluster.threads == 1
    assert resolved("cluster.num_workers=8").cluster.threads == 1
    assert resolved("cluster.num_workers=8", "cluster.threads=2").cluster.threads == 2
    assert resolved("cluster.num_workers=2", "cluster.device=cpu", num_gpus=8, num_cpus=64).cluster.threads == 32
    two_machines = resolved("cluster.num_workers=16", "cluster.address=head:6379", num_gpus=8, num_cpus=64)
    assert two_machines.cluster.threads == 8


def test_what_waits_goes_to_the_hosts_memory_where_there_is_a_gpu():
    assert resolved().trainer.offload == "none"
    assert resolved(num_gpus=1).trainer.offload == "host"
    assert resolved("cluster.num_workers=8", num_gpus=8).trainer.offload == "host"
    assert resolved("trainer.offload=none", num_gpus=1).trainer.offload == "none"
    assert resolved("trainer.offload=disk").trainer.offload == "disk"
    with pytest.raises(ConfigError, match=r"trainer\.offload: is host, but on a CPU"):
        resolved("trainer.offload=host")


def test_more_workers_than_gpus_are_refused_and_the_number_there_is_is_named():
    with pytest.raises(ConfigError, match=r"cluster\.num_workers: is 4, but this machine has 2 GPUs(.|\n)*2 at most"):
        resolved("cluster.num_workers=4", num_gpus=2)
    with pytest.raises(ConfigError, match="has 1 GPU, and"):
        resolved("cluster.num_workers=2", "cluster.device=cuda", num_gpus=1)
    for cure in ("cluster.num_workers=2", "cluster.device=cpu", "cluster.address=head:6379"):
        resolved("cluster.num_workers=4", cure, num_gpus=2)


def test_the_device_of_a_cluster_is_not_guessed_where_this_machine_has_no_gpu():
    cluster = ("cluster.num_workers=2", "cluster.address=head:6379")
    with pytest.raises(ConfigError, match=r"cluster\.device: is auto, but this machine has no GPU"):
        resolved(*cluster)
    assert resolved(*cluster, "cluster.device=cpu").cluster.device == "cpu"
    assert resolved(*cluster, "cluster.device=cuda").model.dtype == "bfloat16"
    assert resolved(*cluster, num_gpus=1).cluster.device == "cuda"
