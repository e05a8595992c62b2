"""Shards cut by hand: as many ranks as a test likes, without a process group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tandem.model.shards import Shard


def cut(whole: Mapping[str, Tensor], size: int) -> list[dict[str, Shard]]:
    """Copies for each rank, as FSDP cuts: equal numbers of rows, the last fewer or none; a number is everyone's."""
    ranks: list[dict[str, Shard]] = []
    for rank in range(size):
        shards: dict[str, Shard] = {}
        for name, tensor in whole.items():
            if tensor.ndim == 0:
                shards[name] = Shard(tensor.clone(), (), primary=rank == 0)
                continue
            rows = -(-len(tensor) // size)
            first = min(rank * rows, len(tensor))
            shards[name] = Shard(tensor[first : first + rows].clone(), tuple(tensor.shape), first)
        ranks.append(shards)
    return ranks


def empty(shards: Mapping[str, Shard], dtype: torch.dtype | None = None) -> dict[str, Shard]:
    """Shards of the same rows to read into."""
    return {name: replace(each, tensor=torch.zeros_like(each.tensor, dtype=dtype)) for name, each in shards.items()}
