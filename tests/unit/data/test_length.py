"""Cutting tokens to a limit."""

from __future__ import annotations

import pytest

from tandem.data.length import Cut, cut_to


@pytest.mark.parametrize(
    ("side", "limit", "kept"),
    [
        ("left", 3, [4, 5, 6]),
        ("right", 3, [0, 1, 2]),
        ("middle", 3, [0, 5, 6]),
        ("middle", 4, [0, 1, 5, 6]),
        ("middle", 1, [6]),
        ("left", 1, [6]),
        ("right", 7, [0, 1, 2, 3, 4, 5, 6]),
        ("middle", 8, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_fault_24_each_cut_keeps_what_it_says(side: Cut, limit: int, kept: list[int]) -> None:
    assert list(cut_to(range(7), limit, side)) == kept
