"""The order of draws: every row once per pass, fair mixing, resumption."""

from __future__ import annotations

from collections import Counter

import pytest

from tandem.data.order import DrawOrder


def drawn(order: DrawOrder, count: int) -> list[tuple[int, int]]:
    return [order.draw() for _ in range(count)]


def test_each_pass_has_every_row_once_in_an_order_of_its_own() -> None:
    order = DrawOrder([20], [1.0], seed=0, shuffle=True)
    passes = [[row for _, row in drawn(order, 20)] for _ in range(3)]
    assert all(sorted(rows) == list(range(20)) for rows in passes)
    assert len({tuple(rows) for rows in passes}) == 3
    assert list(range(20)) not in passes


def test_the_order_is_a_function_of_the_seed() -> None:
    first = drawn(DrawOrder([50], [1.0], seed=3, shuffle=True), 120)
    assert drawn(DrawOrder([50], [1.0], seed=3, shuffle=True), 120) == first
    assert drawn(DrawOrder([50], [1.0], seed=4, shuffle=True), 120) != first


def test_the_order_is_the_same_with_every_version_of_the_libraries() -> None:
    """A run that goes on after an upgrade must find its place: these figures may not change."""
    order = DrawOrder([6, 3], [2.0, 1.0], seed=11, shuffle=True)
    assert drawn(order, 9) == [(0, 3), (1, 0), (0, 0), (0, 4), (1, 2), (0, 1), (0, 2), (1, 1), (0, 5)]


def test_without_shuffling_the_rows_keep_their_order() -> None:
    order = DrawOrder([3], [1.0], seed=0, shuffle=False)
    assert [row for _, row in drawn(order, 7)] == [0, 1, 2, 0, 1, 2, 0]


def test_sources_are_mixed_by_weight_at_every_length() -> None:
    shares = [0.5, 0.3, 0.2]
    order = DrawOrder([100, 7, 1000], [5.0, 3.0, 2.0], seed=0, shuffle=True)
    counts = [0, 0, 0]
    for number in range(1, 500):
        counts[order.draw()[0]] += 1
        assert all(abs(count - share * number) < 1.0 for count, share in zip(counts, shares, strict=True))


def test_a_small_source_starts_over_before_a_large_one_is_through() -> None:
    order = DrawOrder([4, 100], [1.0, 1.0], seed=0, shuffle=True)
    small = [row for source, row in drawn(order, 40) if source == 0]
    assert Counter(small) == Counter(dict.fromkeys(range(4), 5))
    assert all(sorted(small[start : start + 4]) == [0, 1, 2, 3] for start in range(0, 20, 4))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("position", [0, 1, 10, 20, 33])
def test_counts_are_the_whole_state(shuffle: bool, position: int) -> None:
    straight = DrawOrder([7, 3], [0.7, 0.4], seed=5, shuffle=shuffle)
    drawn(straight, position)
    resumed = DrawOrder([7, 3], [0.7, 0.4], seed=5, shuffle=shuffle)
    resumed.move_to(straight.counts)
    assert drawn(resumed, 40) == drawn(straight, 40)


def test_counts_of_other_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="counts of 2 sources"):
        DrawOrder([7], [1.0], seed=0, shuffle=True).move_to([1, 2])
