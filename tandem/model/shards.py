"""Pieces of named tensors: what one rank has of each."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Some neighbouring rows of a tensor, that is, of its first dimension. Alone a rank has all of them.

    Rows are neighbours in memory, so a shard is one range of the tensor's elements in row-major order.
    """

    tensor: Tensor  # [rows, ...], contiguous; may have no rows
    shape: tuple[int, ...]  # of the whole tensor; () for a single number, which every rank has
    first_row: int = 0
    primary: bool = True  # False on a rank that has the same rows as another one, which writes them to files

    @staticmethod
    def whole(tensor: Tensor) -> Shard:
        """All rows."""
        return Shard(tensor, tuple(tensor.shape))

    @property
    def first_element(self) -> int:
        """Where its elements begin among those of the whole tensor."""
        return self.first_row * math.prod(self.shape[1:])
