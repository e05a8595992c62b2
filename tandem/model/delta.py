"""What LoRA adds to a weight: the product of two small factors, added to any part of it (arXiv:2106.09685, 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tandem.model.shards import Shard

_BLOCK = 1 << 22  # elements of a weight that are added to at once: the memory of the sum in float32


@dataclass(frozen=True)
class Delta:
    """scale * left @ right, float32."""

    left: Float[Tensor, "rows r"]
    right: Float[Tensor, "r columns"]
    scale: float

    @staticmethod
    def of(a: Float[Tensor, "r in"], b: Float[Tensor, "out r"], scale: float, *, transposed: bool) -> Delta:
        """What W x + scale * B A x adds to a weight [out, in], or to one [in, out] (GPT-2's)."""
        return Delta(a.T, b.T, scale) if transposed else Delta(b, a, scale)

    @torch.no_grad()
    def add_to(self, part: Float[Tensor, "_ _"], rows: Sequence[range], columns: Sequence[range]) -> None:
        """Add these rows and columns to the part of a weight that they are, in place; the sum is taken in float32.

        Args:
            part: In any floating-point dtype, on any device.
            rows, columns: Of the whole weight, in the order in which they lie in the part.
        """
        left = torch.cat([self.left[each.start : each.stop] for each in rows]).to(part.device, torch.float32)
        right = torch.cat([self.right[:, each.start : each.stop] for each in columns], dim=1)
        right = right.to(part.device, torch.float32)
        step = max(1, _BLOCK // max(1, part.shape[1]))
        for block, factor in zip(part.split(step), left.split(step), strict=True):
            block.copy_(torch.addmm(block.float(), factor, right, alpha=self.scale))

    def added_to(self, weight: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        """A copy of the whole weight with it, in the weight's dtype."""
        result = weight.clone()
        self.add_to(result, [range(weight.shape[0])], [range(weight.shape[1])])
        return result

    def add_to_shard(self, shard: Shard) -> None:
        """The same for the rows that a rank has."""
        rows = range(shard.first_row, shard.first_row + len(shard.tensor))
        self.add_to(shard.tensor, [rows], [range(shard.shape[1])])
