from __future__ import annotations

import pytest

from tandem.trainer.mini_batches import Shuffle, mini_batches
from tests.unit.trainer.made import make_rollouts

ROLLOUTS = make_rollouts()  # 4 groups of 3


def batches(size: int | None, shuffle: Shuffle, epochs: int = 1, seed: tuple[int, ...] = (0, 1)) -> list[list[int]]:
    return list(mini_batches(ROLLOUTS, size=size, shuffle=shuffle, epochs=epochs, seed=seed))


@pytest.mark.parametrize("shuffle", ["groups", "responses", "none"])
@pytest.mark.parametrize("size", [None, 1, 5, 6, 12, 100])
def test_every_row_comes_once_in_each_epoch(size: int | None, shuffle: Shuffle) -> None:
    found = batches(size, shuffle, epochs=3)
    per_epoch = len(found) // 3
    for epoch in range(3):
        part = found[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(row for rows in part for row in rows) == list(range(12))
        assert all(len(rows) <= (size or 12) for rows in part)


def test_the_last_mini_batch_of_an_epoch_may_be_smaller() -> None:
    assert [len(rows) for rows in batches(5, "none", epochs=2)] == [5, 5, 2, 5, 5, 2]


def test_without_shuffling_the_order_is_that_of_the_rollouts() -> None:
    assert batches(4, "none") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_groups_stay_whole() -> None:
    found = batches(3, "groups", epochs=2)
    assert [ROLLOUTS.group_ids[rows].unique().numel() for rows in found] == [1] * 8
    order = [int(ROLLOUTS.group_ids[rows[0]]) for rows in found]
    assert order[:4] != [0, 1, 2, 3] or order[4:] != [0, 1, 2, 3], "nothing is shuffled"


def test_single_responses_are_mixed() -> None:
    found = batches(3, "responses")
    assert any(ROLLOUTS.group_ids[rows].unique().numel() > 1 for rows in found)


@pytest.mark.parametrize("shuffle", ["groups", "responses"])
def test_the_order_is_a_function_of_the_seed_and_differs_between_epochs_and_steps(shuffle: Shuffle) -> None:
    size = 3
    assert batches(size, shuffle, epochs=2) == batches(size, shuffle, epochs=2)
    both = batches(size, shuffle, epochs=2)
    assert both[:4] != both[4:]
    assert batches(size, shuffle, seed=(0, 1)) != batches(size, shuffle, seed=(0, 2))
    assert batches(size, shuffle, seed=(0, 1)) != batches(size, shuffle, seed=(7, 1))
    assert batches(size, shuffle, epochs=1) == both[:4], "the first epoch does not depend on how many follow"


def test_one_mini_batch_is_not_shuffled() -> None:
    """Its order changes nothing but last bits."""
    assert batches(None, "responses", epochs=2) == [list(range(12))] * 2
