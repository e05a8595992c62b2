"""What two ranks have in common, how it is cut, and who gives what to whom."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tandem.model.layouts import Box, Layout, common
from tandem.model.moves import fill_buckets, least_bytes, plan_moves


def layout(shape: tuple[int, ...], **ranges: Sequence[range]) -> Layout:
    """Everything, but for the dimensions that are given: d0=[range(0, 3)]."""
    dims = [(range(size),) for size in shape]
    for dim, given in ranges.items():
        dims[int(dim[1:])] = tuple(given)
    return Layout(shape, tuple(dims), torch.float32)


def taken(whole: Tensor, layout: Layout) -> Tensor:
    """A rank's memory under a layout."""
    for dim, ranges in enumerate(layout.ranges):
        whole = whole.index_select(dim, torch.tensor([index for each in ranges for index in each], dtype=torch.long))
    return whole


def box_of(tensor: Tensor, start: tuple[int, ...], box: Box) -> Tensor:
    return tensor[tuple(slice(first, first + size) for first, size in zip(start, box.shape, strict=True))]


SHAPE = (6, 8)
LAYOUTS = [
    layout(SHAPE),
    layout(SHAPE, d0=[range(2, 5)]),
    layout(SHAPE, d0=[range(6, 6)]),
    layout(SHAPE, d0=[]),
    layout(SHAPE, d1=[range(3, 8)]),
    layout(SHAPE, d1=[range(2), range(4, 6)]),
    layout(SHAPE, d0=[range(1), range(3, 4)], d1=[range(2, 4), range(6, 8)]),
]


@pytest.mark.parametrize("need", LAYOUTS)
@pytest.mark.parametrize("have", LAYOUTS)
@pytest.mark.parametrize("max_elements", [1, 5, 100])
def test_boxes_are_what_both_have(have: Layout, need: Layout, max_elements: int) -> None:
    whole = torch.arange(48).view(SHAPE)
    source, target = taken(whole, have), taken(whole, need)
    assert (have.elements, need.elements) == (source.numel(), target.numel())
    found: list[int] = []
    for box in common(have, need):
        for piece in box.cut(max_elements):
            assert 0 < piece.elements <= max_elements
            values = box_of(source, piece.source, piece)
            assert torch.equal(values, box_of(target, piece.target, piece))
            found += values.flatten().tolist()
    assert sorted(found) == sorted(set(source.flatten().tolist()) & set(target.flatten().tolist()))


def test_a_single_number_is_one_box() -> None:
    number = layout(())
    assert common(number, number) == [Box((), (), ())]
    assert list(Box((), (), ()).cut(1)) == [Box((), (), ())]


def test_rows_are_cut_into_as_few_blocks_as_fit() -> None:
    assert [box.shape for box in Box((0, 0, 0), (4, 0, 0), (5, 2, 3)).cut(12)] == [(2, 2, 3), (2, 2, 3), (1, 2, 3)]
    assert [box.target for box in Box((0, 0), (4, 1), (2, 4)).cut(3)] == [(4, 1), (4, 4), (5, 1), (5, 4)]


def test_the_nearest_copy_gives_and_copies_share_the_work() -> None:
    """Hybrid sharding: ranks 0 and 2 have the upper rows, 1 and 3 the lower ones, and all want everything."""
    upper, lower = layout((4, 2), d0=[range(2)]), layout((4, 2), d0=[range(2, 4)])
    have = [{"weight": each} for each in (upper, lower, upper, lower)]
    need = [{"weight": layout((4, 2))}] * 4

    def pairs(machines: list[str]) -> set[tuple[int, int]]:
        return {(move.source, move.target) for move in plan_moves(have, need, machines)}

    assert pairs(["a", "a", "b", "b"]) == {(1, 0), (0, 1), (3, 2), (2, 3)}
    assert pairs(["a", "b", "b", "a"]) == {(3, 0), (2, 1), (1, 2), (0, 3)}
    senders = [source for source, _ in pairs(["a"] * 4)]
    assert sorted(senders) == [0, 1, 2, 3]


def test_buckets_keep_the_limit_on_every_rank_and_every_rank_busy() -> None:
    """Four ranks have 16 rows each of two tensors, all want all: 3 x 16 rows come to each, at most 6 at once."""
    shape, row = (64, 8), 32
    have = [{name: layout(shape, d0=[range(16 * rank, 16 * rank + 16)]) for name in "ab"} for rank in range(4)]
    need = [{name: layout(shape) for name in "ab"}] * 4
    buckets = list(fill_buckets(plan_moves(have, need, ["m"] * 4), num_ranks=4, max_bytes=6 * row))

    assert sum(move.bytes for bucket in buckets for move in bucket) == least_bytes(have, need) == 2 * 4 * 48 * row
    for bucket in buckets:
        for rank in range(4):
            assert sum(move.bytes for move in bucket if move.source == rank) <= 6 * row
            assert sum(move.bytes for move in bucket if move.target == rank) <= 6 * row
    assert len(buckets) == 2 * 48 / 6  # so all of them are full, on every rank
