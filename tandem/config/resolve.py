"""Decide every `auto` that can be decided without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tandem.config.algorithm import Correction
from tandem.config.checks import contradictions, updates_per_step
from tandem.config.cluster import ClusterConfig
from tandem.config.schema import Config
from tandem.errors import ConfigError, Problem

OldLogprobs = Literal["update", "rollout", "recompute"]


def resolve_config(
    config: Config, *, num_cpus: int, num_gpus: int, has_vllm: bool = False, name: str = "run"
) -> Config:
    """Put values in place of `auto`, as far as the machine and the config itself decide them.

    `rollout.kv_cache_gib`, `trainer.micro_batch_tokens`, `trainer.packing`, `trainer.activation_checkpointing`,
    `data.truth_key` and `data.chat_template` may stay `auto`: the model, the batch or the data decide.

    Args:
        config: What was loaded.
        num_cpus: CPUs that this process may use.
        num_gpus: CUDA devices that this process may use.
        has_vllm: vLLM is installed.
        name: Names the run's folder where the config does not, `runs/<name>`: the YAML file's name without its end.

    Raises:
        ConfigError: The settings do not fit this machine, or not each other once it is known.
    """
    device = _device(config.cluster, num_gpus)
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    deterministic = config.cluster.deterministic
    threads = config.cluster.threads
    if threads == "auto":
        # Of a cluster nothing is known: as if its machines were like this one.
        at_most = num_gpus if device == "cuda" and num_gpus else config.cluster.num_workers
        threads = max(1, num_cpus // min(config.cluster.num_workers, at_most))
    engine = config.rollout.engine
    if engine == "auto":
        engine = "vllm" if has_vllm and device == "cuda" else "embedded"
    offload = config.trainer.offload
    if offload == "auto":
        offload = "host" if device == "cuda" else "none"
    cluster = {
        "device": device,
        "deterministic": device == "cpu" if deterministic == "auto" else deterministic,
        "threads": threads,
    }
    attention = "sdpa" if config.model.attention == "auto" else config.model.attention
    model = config.model.model_copy(update={"dtype": dtype, "attention": attention})
    folder = str(Path(config.run.folder or f"runs/{name}").expanduser())
    resolved = config.model_copy(
        update={
            "run": config.run.model_copy(update={"folder": folder}),
            "model": model,
            "rollout": config.rollout.model_copy(update={"engine": engine}),
            "trainer": config.trainer.model_copy(update={"offload": offload}),
            "cluster": config.cluster.model_copy(update=cluster),
        }
    )
    old_logprobs = _old_logprobs(resolved)
    chosen = {"old_logprobs": old_logprobs, "correction": _correction(resolved, old_logprobs)}
    resolved = resolved.model_copy(update={"algorithm": config.algorithm.model_copy(update=chosen)})
    conflicts = contradictions(resolved)
    if conflicts:
        raise ConfigError([Problem(item.keys[0], item.message, item.remedy) for item in conflicts])
    return resolved


def _device(cluster: ClusterConfig, num_gpus: int) -> Literal["cpu", "cuda"]:
    """The device of the workers, which are on this machine unless they join a cluster."""
    if cluster.device == "cpu":
        return "cpu"
    if cluster.address is not None:
        if cluster.device == "auto" and num_gpus == 0:
            message = "is auto, but this machine has no GPU, which says nothing about those of the cluster"
            remedy = "set cluster.device=cuda if the cluster has GPUs, else cpu"
            raise ConfigError([Problem("cluster.device", message, remedy)])
        return "cuda"
    if cluster.device == "auto" and num_gpus == 0:
        return "cpu"
    if num_gpus == 0:
        remedy = "set cluster.device=cpu, or check that PyTorch was installed with CUDA and sees the GPU"
        raise ConfigError([Problem("cluster.device", "is cuda, but there is no CUDA device", remedy)])
    if cluster.num_workers > num_gpus:
        gpus = f"{num_gpus} {'GPU' if num_gpus == 1 else 'GPUs'}"
        message = f"is {cluster.num_workers}, but this machine has {gpus}, and each worker needs one"
        remedy = f"set it to {num_gpus} at most, join a cluster with cluster.address, or set cluster.device=cpu"
        raise ConfigError([Problem("cluster.num_workers", message, remedy)])
    return "cuda"


def _engine_is_exact(config: Config) -> bool:
    """Whether log-probs kept while sampling are the trainer's, to rounding."""
    is_float32 = config.model.dtype == "float32" and config.model.head_dtype == "float32"
    return is_float32 and config.rollout.engine == "embedded"


def _correction(config: Config, old_logprobs: OldLogprobs) -> Correction:
    """Where the two differ, and can be compared.

    With `rollout` the ratio of the loss is to the engine already, and nothing is left.
    """
    if config.algorithm.correction != "auto":
        return config.algorithm.correction
    is_none = old_logprobs == "rollout" or config.rollout.has_cut_logprobs or _engine_is_exact(config)
    return "none" if is_none else "token_tis"


def _old_logprobs(config: Config) -> OldLogprobs:
    """The cheapest that is exact: no extra pass where the update or the sampling has the same numbers already.

    A correction compares the trainer's with the engine's, so it needs the trainer's. A KL penalty in the rewards needs
    them before the update.
    """
    if config.algorithm.old_logprobs != "auto":
        return config.algorithm.old_logprobs
    if config.rollout.is_cut:
        return "recompute"
    if updates_per_step(config) == 1 and not config.algorithm.kl_in_reward:
        return "update"
    compared = config.algorithm.correction not in ("auto", "none")
    return "rollout" if _engine_is_exact(config) and not compared else "recompute"
