"""What can be known to be wrong with vLLM before it is started."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from tandem.errors import ConfigError, ModelError, Problem
from tandem.rollout.vllm_process import starting_vllm

_GIB = 1 << 30
_BLOCK = 128  # tokens of a block of vLLM's cache, the largest that it takes by itself

# What Tandem says to vLLM itself, and by which key of the config; "" = it cannot be otherwise.
_OURS: Mapping[str, str] = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "max_model_len": "data.max_prompt_length and rollout.max_response_length",
    "max_num_seqs": "rollout.max_concurrent",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "gpu_memory_utilization": "rollout.kv_cache_gib",
    "num_gpu_blocks_override": "rollout.kv_cache_gib",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "data_parallel_size": "cluster.num_workers",
    "seed": "run.seed",
    **dict.fromkeys(
        (
            "skip_tokenizer_init",
            "generation_config",
            "load_format",
            "logprobs_mode",
            "enable_sleep_mode",
            "disable_log_stats",
            "distributed_executor_backend",
            "pipeline_parallel_size",
            "hf_config_path",
            "hf_overrides",
            "quantization",
            "model_impl",  # vLLM's own code: its backend of transformers changes the trainer's classes in this process
            "model_class_overrides",
            "runner",
            "convert",
            "worker_cls",
            "scheduler_cls",
            "stream_interval",  # stop strings are looked for at every token
            "speculative_config",  # the log-probs of a draft's tokens are not the policy's
            "spec_method",
            "spec_model",
            "spec_tokens",
        ),
        "",
    ),
}


def is_installed() -> bool:
    """Whether there is a vLLM to import."""
    return importlib.util.find_spec("vllm") is not None


def check_installed() -> None:
    """Raises ConfigError where there is none."""
    if not is_installed():
        remedy = "install it: pip install vllm where there is a GPU, else make vllm; or take embedded"
        raise ConfigError([Problem("rollout.engine", "is vllm, which is not installed", remedy)])


def check_options(options: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Find names that vLLM does not know, those that are Tandem's to set, and what has no effect.

    Args:
        options: Engine arguments by vLLM's names.
        on_cpu: vLLM will work on CPUs.

    Raises:
        ConfigError: All of them, with what was meant.
    """
    problems: list[Problem] = []
    if options:
        with starting_vllm():
            from vllm.engine.arg_utils import EngineArgs
        known = [each.name for each in dataclasses.fields(EngineArgs)]
        for name in options:
            if name in _OURS:
                ours = _OURS[name]
                remedy = f"set {ours} instead" if ours else "leave it out"
                problems.append(Problem("rollout.vllm_options", f"{name} is Tandem's to set", remedy))
            elif name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                remedy = f"did you mean {close[0]}?" if close else "see the engine arguments in vLLM's documentation"
                problems.append(Problem("rollout.vllm_options", f"vLLM has no option {name}", remedy))
    if on_cpu and options.get("enforce_eager") is False:  # see starting_vllm
        message = "enforce_eager=false has no effect on CPUs, where nothing of vLLM is compiled"
        problems.append(Problem("rollout.vllm_options", message, "leave it out"))
    if problems:
        raise ConfigError(problems)


def check_model(
    config: PreTrainedConfig,
    architecture: str,
    *,
    dtype: torch.dtype,
    on_cpu: bool,
    max_length: int,
    cache_bytes: int | None,
    tensor_parallel: int = 1,
) -> None:
    """Find out whether vLLM has this architecture, and whether a sequence fits into its cache.

    Args:
        config: Of the model.
        architecture: Name of its class.
        dtype: It computes in.
        on_cpu: vLLM will work on CPUs.
        max_length: Of a sequence, in tokens.
        cache_bytes: What keys and values may take. None = what it takes.
        tensor_parallel: Ranks that share a sequence's keys and values.

    Raises:
        ModelError: The first thing that speaks against it.
    """
    with starting_vllm():
        from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    remedy = "set rollout.engine=embedded"
    code = ModelRegistry.models.get(architecture)
    if code is None:
        raise ModelError(f"rollout.engine: vLLM has no {architecture}", remedy=remedy)
    if isinstance(code, _LazyRegisteredModel) and code.class_name.startswith("Transformers"):
        raise ModelError(
            f"rollout.engine: vLLM has no code of its own for {architecture}, and that of transformers, which it would "
            "run instead, is the trainer's in this process",
            remedy=remedy,
        )
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if on_cpu and _head_size(config) not in sizes:
        raise ModelError(
            f"rollout.engine: vLLM has no attention on CPUs for heads of size {_head_size(config)}, only for "
            f"{', '.join(map(str, sizes))}",
            remedy=f"{remedy}, or use a model with such heads",
        )
    needed = cache_bytes_needed(config, max_length, dtype, tensor_parallel)
    if cache_bytes is not None and cache_bytes < needed:
        raise ModelError(
            f"rollout.kv_cache_gib is {cache_bytes / _GIB:.3g}, but keys and values of one sequence of {max_length} "
            f"tokens take {needed / _GIB:.3g}, with the block that vLLM keeps for itself",
            remedy=f"set it to {needed / _GIB * 1.01:.3g} or more, or lower rollout.max_response_length",
        )


def cache_bytes_needed(
    config: PreTrainedConfig, max_length: int, dtype: torch.dtype, tensor_parallel: int = 1, *, sequences: int = 1
) -> int:
    """Bytes on a rank of the keys and values of so many sequences, as if every layer kept all of them.

    In whole blocks, and one more: vLLM keeps one empty.
    """
    fields = config.to_dict()
    heads = -(-(fields.get("num_key_value_heads") or config.num_attention_heads) // tensor_parallel)
    per_token = 2 * config.num_hidden_layers * heads * _head_size(config) * dtype.itemsize
    blocks = sequences * -(-max_length // _BLOCK) + 1
    return blocks * _BLOCK * per_token


def _head_size(config: PreTrainedConfig) -> int:
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
