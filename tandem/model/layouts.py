"""Which part of a tensor a rank has, and what the parts of two ranks have in common.

layout_of(shard)        rows, as FSDP cuts tensors
layout_of(parameter)    what a tensor-parallel plan leaves to this rank, or all of it
common(have, need)      the boxes that lie in both
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from tandem.model.shards import Shard

Piece = Shard | Tensor
"""What a rank has of a tensor. A Tensor is a DTensor or, where the rank has all of it, a plain one."""


@dataclass(frozen=True)
class Layout:
    """One rank's part of a tensor: the indices that it has along each dimension.

    Most often they are one range. A fused weight has several: half of the gate's rows and half of the up projection's.
    """

    shape: tuple[int, ...]  # of the whole tensor
    ranges: tuple[tuple[range, ...], ...]  # for each dimension, in the order in which they lie in the rank's memory
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """How many of the tensor's elements the rank has."""
        return math.prod(sum(len(each) for each in ranges) for ranges in self.ranges)


@dataclass(frozen=True)
class Box:
    """Elements that two ranks have: where the box begins in the memory of the one and of the other, and its size."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    def cut(self, max_elements: int) -> Iterator[Box]:
        """Boxes of at most `max_elements` that make up this one: blocks of rows, and of parts of a row if it is large.

        Args:
            max_elements: At least 1.
        """
        if self.elements <= max_elements:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.shape) if size > 1)
        rows = self.shape[dim]
        step = max(1, max_elements * rows // self.elements)
        for first in range(0, rows, step):
            yield from self._rows(dim, first, min(step, rows - first)).cut(max_elements)

    def _rows(self, dim: int, first: int, count: int) -> Box:
        def moved(start: tuple[int, ...]) -> tuple[int, ...]:
            return (*start[:dim], start[dim] + first, *start[dim + 1 :])

        return Box(moved(self.source), moved(self.target), (*self.shape[:dim], count, *self.shape[dim + 1 :]))


def local(piece: Piece) -> Tensor:
    """This rank's memory of it."""
    if isinstance(piece, Shard):
        return piece.tensor
    return piece.to_local() if isinstance(piece, DTensor) else piece


def layout_of(piece: Piece) -> Layout:
    """This rank's part. No communication; the piece may be on "meta"."""
    shape = tuple(piece.shape)
    ranges = [(range(size),) for size in shape]
    if isinstance(piece, Shard) and shape:
        ranges[0] = (range(piece.first_row, piece.first_row + len(piece.tensor)),)
    if isinstance(piece, DTensor):
        ranges = [_ranges(piece, dim) for dim in range(len(shape))]
    return Layout(shape, tuple(ranges), local(piece).dtype)


def common(have: Layout, need: Layout) -> list[Box]:
    """The boxes that make up what both have of the same tensor; none where they have nothing in common."""
    assert have.shape == need.shape
    dims = (_common_ranges(*ranges) for ranges in zip(have.ranges, need.ranges, strict=True))
    boxes: list[Box] = []
    for ranges in product(*dims):
        source, target, shape = zip(*ranges, strict=True) if ranges else ((), (), ())
        boxes.append(Box(source, target, shape))
    return boxes


def _common_ranges(have: tuple[range, ...], need: tuple[range, ...]) -> list[tuple[int, int, int]]:
    """Begin in the one's memory, begin in the other's, and length, of the indices that are in both."""
    found: list[tuple[int, int, int]] = []
    source = 0
    for ours in have:
        target = 0
        for theirs in need:
            first, end = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
            if first < end:
                found.append((source + first - ours.start, target + first - theirs.start, end - first))
            target += len(theirs)
        source += len(ours)
    return found


def _ranges(tensor: DTensor, dim: int) -> tuple[range, ...]:
    """The indices along `dim` that this rank has: those that remain of 0, 1, 2 ... when they are cut as the tensor is.

    So whatever cuts the tensor, fused weights included, says itself what it does.
    """
    kinds = dtensor.Shard | _StridedShard  # the second one cuts each of the weights that are fused into one
    cuts = [isinstance(each, kinds) and each.dim == dim for each in tensor.placements]
    size = tensor.shape[dim]
    if not any(cuts):
        return (range(size),)
    placements = [each if cut else dtensor.Replicate() for each, cut in zip(tensor.placements, cuts, strict=True)]
    index = torch.arange(size, device=tensor.device_mesh.device_type)
    index = index.view([-1 if each == dim else 1 for each in range(tensor.ndim)])
    mine = dtensor.distribute_tensor(index, tensor.device_mesh, placements, src_data_rank=None).to_local().flatten()
    gaps = (mine.diff() != 1).nonzero().flatten() + 1
    runs = [run.tolist() for run in mine.tensor_split(gaps.tolist())]
    return tuple(range(run[0], run[-1] + 1) for run in runs if run)
