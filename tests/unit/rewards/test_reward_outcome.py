"""What a function may return."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tandem.rewards.outcome import read_many, read_one

ONE = [
    1,
    1.0,
    True,
    np.float32(1),
    np.int64(1),
    np.bool_(True),
    np.array(1.0),
    torch.tensor(1),
    Fraction(1),
    Decimal(1),
]


@pytest.mark.parametrize("returned", ONE, ids=lambda value: type(value).__name__)
def test_fault_34_one_number_in_any_type_is_accepted(returned: Any) -> None:
    outcome = read_one("mine", returned)
    assert outcome.value == 1.0
    assert type(outcome.value) is float
    assert read_one("mine", {"score": returned}).value == 1.0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None"),
        ("1.0", "the text '1.0'"),
        ([1.0], "a list"),
        (np.ones(2), r"a ndarray of shape \(2,\)"),
        (torch.ones(1), r"a Tensor of shape \(1,\)"),
        (float("nan"), "not finite"),
        (float("-inf"), "not finite"),
        (10**400, "not finite"),
        (1j, "a complex"),
        ({"reward": 1.0}, "without the key 'score' \\(keys: reward\\)"),
        ({"score": None}, "returned None"),
        ({}, "keys: none"),
    ],
)
def test_fault_34_anything_else_is_an_error_that_names_the_function(returned: Any, message: str) -> None:
    outcome = read_one("mine", returned)
    assert outcome.value is None
    assert "reward function mine" in str(outcome.error)
    assert re.search(message, str(outcome.error))


def test_a_coroutine_is_named_and_closed() -> None:
    async def late() -> float:
        return 1.0

    outcome = read_one("mine", late())
    assert outcome.value is None
    assert "async def" in str(outcome.error)


def test_further_numbers_are_metrics_and_the_rest_is_ignored() -> None:
    outcome = read_one("mine", {"score": 0.5, "acc": True, "length": 7, "pred": "x", "broken": float("nan"), "mean": 2})
    assert outcome.value == 0.5
    assert outcome.metrics == {"acc": 1.0, "length": 7.0, "mine/mean": 2.0}


@pytest.mark.parametrize("returned", [[1, 0.5], (1, 0.5), np.array([1, 0.5]), torch.tensor([1, 0.5])])
def test_a_batch_is_any_list_of_numbers(returned: Any) -> None:
    assert [outcome.value for outcome in read_many("mine", returned, 2)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "the number 1.0 for a batch of 2, not a list"),
        ("ab", "the text 'ab'"),
        ({"score": [1, 2]}, "a dict"),
        ([1.0], "1 values for a batch of 2"),
        (np.ones((2, 1)), "shape (2, 1)"),
        (None, "None"),
    ],
)
def test_fault_34_a_batch_of_the_wrong_shape(returned: Any, message: str) -> None:
    outcomes = read_many("mine", returned, 2)
    assert [outcome.value for outcome in outcomes] == [None, None]
    assert all(message in str(outcome.error) for outcome in outcomes)


def test_fault_33_each_row_of_a_batch_is_read_by_itself() -> None:
    first, second, third = read_many("mine", [{"score": 1, "acc": 1}, 0.0, None], 3)
    assert (first.value, dict(first.metrics)) == (1.0, {"acc": 1.0})
    assert (second.value, dict(second.metrics)) == (0.0, {})
    assert third.value is None
