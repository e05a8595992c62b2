"""The built-in rewards for numbers and texts, judged as a person would."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tandem.errors import RewardError
from tandem.rewards.numbers import accepted_answers, exact_match, find_number, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### $72", 72),
        ("#### 72.", 72),
        ("#### 1,234", 1234),
        ("####72", 72),
        ("first 3, then 4\n#### 5 of the 9", 5),
        ("#### 1\n#### 2", 2),
        ("#### nothing, or 8?", 8),
        ("It is 3. No, 4!", 4),
        ("-5", -5),
        ("x=-2.50", Fraction(-5, 2)),
        ("\u22127", -7),
        ("$-1,072.00", -1072),
        ("-$3", -3),
        ("\\$3", 3),
        ("10-3", 3),
        ("10 - 3", 3),
        ("(a)-3", 3),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("48/2 = 24", 24),
        ("1e3", 1000),
        ("2,5", 5),
        ("12,345,678.9", Fraction(123456789, 10)),
        ("10%", 10),
        ("1/0", None),
        ("none", None),
        ("", None),
        ("9" * 5000, None),
        ("1e999999999", 999999999),
    ],
)
def test_fault_36_the_number_that_a_text_gives_as_its_answer(text: str, number: Any) -> None:
    assert find_number(text) == number


@pytest.mark.parametrize(
    "truth", [4, 4.0, "4", " 4\n", ["4"], [["3"], [4]], np.array([4]), np.int64(4), {"target": [4]}]
)
def test_fault_35_four_is_four_in_any_type(truth: Any) -> None:
    assert exact_match(" 4 ", truth) == 1.0
    assert last_number("#### 4", truth) == 1.0
    assert exact_match("5", truth) == 0.0
    assert last_number("#### 5", truth) == 0.0


def test_exact_match_compares_texts() -> None:
    assert exact_match("Paris\n", "Paris") == 1.0
    assert exact_match("paris", "Paris") == 0.0
    assert exact_match("4.0", 4.0) == 1.0
    assert exact_match("4.0", 4) == 0.0


def test_last_number_reads_the_truth_as_it_reads_the_response() -> None:
    assert last_number("so 1234", "They need 1,234 bricks.\n#### 1,234") == 1.0
    assert last_number("0.75", "3/4") == 1.0
    assert last_number("4", "3/4") == 0.0


@pytest.mark.parametrize("truth", [None, [], [None], np.array([])])
def test_without_a_truth_nothing_can_be_scored(truth: Any) -> None:
    with pytest.raises(RewardError, match="nothing can be right"):
        accepted_answers(truth)


def test_a_truth_without_a_number() -> None:
    with pytest.raises(RewardError, match="'Paris' has no number"):
        last_number("4", "Paris")
