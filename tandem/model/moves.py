"""Which rank gives what to which: the plan of a reshard, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from tandem.model.layouts import Box, Layout, common


@dataclass(frozen=True)
class Move:
    """A box of a tensor that one rank gives to another, or has itself."""

    name: str
    source: int  # rank
    target: int  # rank
    box: Box
    dtype: torch.dtype  # in which it travels: the target's

    @property
    def bytes(self) -> int:
        """Its size on the way."""
        return self.box.elements * self.dtype.itemsize


Layouts = Mapping[str, Layout]
"""One rank's part of each tensor, by name."""


def kept_moves(rank: int, have: Layouts, need: Layouts) -> list[Move]:
    """What a rank needs and has itself."""
    return [
        Move(name, rank, rank, box, layout.dtype) for name, layout in need.items() for box in common(have[name], layout)
    ]


def plan_moves(have: Sequence[Layouts], need: Sequence[Layouts], machines: Sequence[str]) -> Iterator[Move]:
    """Give every rank what it needs and does not have itself, each element once; those of one dtype follow each other.

    Where several ranks have the same part, it comes from one on the same machine if there is any, and of these from
    the one that has the least to send so far.

    Args:
        have: Of each rank. Any two have the same part of a tensor or nothing in common, all together have all of it.
        need: Of each rank.
        machines: Of each rank, the name of its machine.
    """
    sent = [0] * len(have)

    def distance(source: int, target: int) -> tuple[bool, int, int]:
        return machines[source] != machines[target], sent[source], abs(source - target)

    for name in _by_dtype(have, need):
        holders: dict[Layout, list[int]] = {}
        for rank, layouts in enumerate(have):
            holders.setdefault(layouts[name], []).append(rank)
        for target, layouts in enumerate(need):
            for layout, ranks in holders.items():
                if target in ranks or not (boxes := common(layout, layouts[name])):
                    continue
                _, source = min((distance(rank, target), rank) for rank in ranks)
                for box in boxes:
                    move = Move(name, source, target, box, layouts[name].dtype)
                    sent[source] += move.bytes
                    yield move


def fill_buckets(moves: Iterable[Move], *, num_ranks: int, max_bytes: int) -> Iterator[list[Move]]:
    """Cut the moves of `plan_moves` and put them into buckets, each of one dtype.

    Args:
        moves: Those of one tensor follow each other.
        num_ranks: All of them.
        max_bytes: What a rank may send, and what it may receive, in one bucket. At least one element always fits.
    """
    bucket: list[Move] = []
    sent, received = [0] * num_ranks, [0] * num_ranks
    for move in _cut(moves, max_bytes // num_ranks):
        is_full = max(sent[move.source], received[move.target]) + move.bytes > max_bytes
        if bucket and (is_full or bucket[0].dtype != move.dtype):
            yield bucket
            bucket = []
            sent, received = [0] * num_ranks, [0] * num_ranks
        bucket.append(move)
        sent[move.source] += move.bytes
        received[move.target] += move.bytes
    if bucket:
        yield bucket


def least_bytes(have: Sequence[Layouts], need: Sequence[Layouts]) -> int:
    """Bytes that the ranks need and do not have themselves. No way of moving weights moves less between them."""
    total = 0
    for ours, theirs in zip(have, need, strict=True):
        for name, layout in theirs.items():
            there = sum(box.elements for box in common(ours[name], layout))
            total += (layout.elements - there) * layout.dtype.itemsize
    return total


def _by_dtype(have: Sequence[Layouts], need: Sequence[Layouts]) -> list[str]:
    """All names, those of one dtype together."""
    names = need[0].keys()
    assert all(layouts.keys() == names for layouts in (*have, *need)), "source and target have other tensors"
    return sorted(names, key=lambda name: str(need[0][name].dtype))


def _cut(moves: Iterable[Move], max_bytes: int) -> Iterator[Move]:
    """Moves of at most `max_bytes`, tensor by tensor; of a large one first a block from every rank, then the next."""
    for _, of_tensor in groupby(moves, key=lambda move: move.name):
        blocks = [
            (number, Move(move.name, move.source, move.target, box, move.dtype))
            for move in of_tensor
            for number, box in enumerate(move.box.cut(max(1, max_bytes // move.dtype.itemsize)))
        ]
        yield from (move for _, move in sorted(blocks, key=lambda block: block[0]))
