"""Decide every `auto` that can be decided without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tandem.config.checks import contradictions, updates_per_step
from tandem.config.schema import Config
from tandem.errors import ConfigError, Problem


def resolve_config(config: Config, *, num_cpus: int, has_cuda: bool, name: str = "run") -> Config:
    """Put values in place of `auto`, as far as the machine and the config itself decide them.

    `rollout.kv_cache_gib`, `trainer.micro_batch_tokens`, `trainer.packing`, `trainer.activation_checkpointing`,
    `data.truth_key` and `data.chat_template` may stay `auto`: the model, the batch or the data decide.

    Args:
        config: What was loaded.
        num_cpus: CPUs that this process may use.
        has_cuda: There is a CUDA device.
        name: Names the run's folder where the config does not, `runs/<name>`: the YAML file's name without its end.

    Raises:
        ConfigError: The settings do not fit this machine, or not each other once it is known.
    """
    if config.cluster.device == "cuda" and not has_cuda:
        remedy = "set cluster.device=cpu, or check that PyTorch was installed with CUDA and sees the GPU"
        raise ConfigError([Problem("cluster.device", "is cuda, but there is no CUDA device", remedy)])
    device = config.cluster.device
    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    deterministic = config.cluster.deterministic
    threads = config.cluster.threads
    cluster = {
        "device": device,
        "deterministic": device == "cpu" if deterministic == "auto" else deterministic,
        "threads": num_cpus if threads == "auto" else threads,
    }
    attention = "sdpa" if config.model.attention == "auto" else config.model.attention
    model = config.model.model_copy(update={"dtype": dtype, "attention": attention})
    folder = str(Path(config.run.folder or f"runs/{name}").expanduser())
    resolved = config.model_copy(
        update={
            "run": config.run.model_copy(update={"folder": folder}),
            "model": model,
            "cluster": config.cluster.model_copy(update=cluster),
        }
    )
    algorithm = config.algorithm.model_copy(update={"old_logprobs": _old_logprobs(resolved)})
    resolved = resolved.model_copy(update={"algorithm": algorithm})
    conflicts = contradictions(resolved)
    if conflicts:
        raise ConfigError([Problem(item.keys[0], item.message, item.remedy) for item in conflicts])
    return resolved


def _old_logprobs(config: Config) -> Literal["update", "rollout", "recompute"]:
    """The cheapest that is exact: no extra pass where the update or the sampling has the same numbers already."""
    if config.algorithm.old_logprobs != "auto":
        return config.algorithm.old_logprobs
    if config.rollout.top_p < 1 or config.rollout.top_k is not None:
        return "recompute"
    if updates_per_step(config) == 1:
        return "update"
    is_exact = config.model.dtype == "float32" and config.model.head_dtype == "float32"
    return "rollout" if is_exact else "recompute"
