"""How many tokens fit into one forward and backward pass, from the model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedConfig

from tandem.model.ranks import ALONE, Ranks

_GIB = 1 << 30
# Fixed, not measured: the cut into micro-batches changes last bits, and the same run must repeat them anywhere.
# On CPUs for all ranks together, wherever they are: they may share one machine.
_CPU_ACTIVATIONS = 2 * _GIB  # half as much is no slower, until a long prompt is run again for each part of its group
_CPU_LONGEST = 8 * _GIB  # of one sequence, before activations are rather computed twice: a third more work
_CUDA_SHARE = 0.3
_CUDA_LONGEST_SHARE = 0.5
_MIN_TOKENS, _MAX_TOKENS = 512, 65536


@dataclass(frozen=True)
class MemoryPlan:
    """What `auto` becomes for a model on a device."""

    micro_batch_tokens: int
    activation_checkpointing: bool


def activation_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """What a decoder layer keeps of one token for its backward pass, times the layers.

    About 14 vectors of the hidden size (two norms with their float32 copies, q, k, v, attention, residuals) and five
    of the intermediate size (gate, up, their activation and product). An estimate to cut by, on the safe side.
    """
    fields = config.to_dict()
    hidden = int(fields.get("hidden_size") or fields["n_embd"])
    intermediate = int(fields.get("intermediate_size") or fields.get("n_inner") or 4 * hidden)
    layers = int(fields.get("num_hidden_layers") or fields["n_layer"])
    experts = int(fields.get("num_experts_per_tok") or 0)
    if experts:
        intermediate = experts * int(fields.get("moe_intermediate_size") or intermediate)
    return layers * (14 * hidden + 5 * intermediate) * dtype.itemsize


def plan_memory(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_sequence: int,
    micro_batch_tokens: int | Literal["auto"] = "auto",
    activation_checkpointing: bool | Literal["auto"] = "auto",
    ranks: Ranks = ALONE,
) -> MemoryPlan:
    """Choose what is `auto`. Checkpointing is switched on where one longest sequence would take too much without.

    The same on every rank, or they would cut a batch differently and wait for one another without end.

    Args:
        config: The model's.
        dtype: What it computes in.
        device: Where.
        max_sequence: Longest prompt and response together, in tokens.
        micro_batch_tokens, activation_checkpointing: What the config says.
        ranks: Those that train the model together; each must call this, as GPUs ask one another for the smallest.
    """
    budget, bearable = _CPU_ACTIVATIONS // ranks.size, _CPU_LONGEST // ranks.size
    if device.type == "cuda":
        memory = min(ranks.gather(torch.cuda.get_device_properties(device).total_memory))
        budget, bearable = int(memory * _CUDA_SHARE), int(memory * _CUDA_LONGEST_SHARE)
    per_token = activation_bytes_per_token(config, dtype)
    if activation_checkpointing == "auto":
        longest = max_sequence if micro_batch_tokens == "auto" else max(max_sequence, micro_batch_tokens)
        activation_checkpointing = per_token * longest > bearable
    if activation_checkpointing:  # one vector per layer stays, and one layer at a time is run again
        per_token = max(1, per_token // 8)
    if micro_batch_tokens == "auto":
        micro_batch_tokens = max(_MIN_TOKENS, min(_MAX_TOKENS, budget // per_token))
    return MemoryPlan(micro_batch_tokens, activation_checkpointing)
