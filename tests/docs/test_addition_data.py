"""The data of examples/addition.py are what the README says of them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "addition.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def test_the_held_out_sums_are_seen_by_neither_stage(example: dict[str, Any]) -> None:
    heldout = {row["prompt"] for row in example["heldout"]()}
    train = {row["prompt"] for row in example["train"]()}
    warm_start = {row["prompt"] for row in example["warm_start"]()}
    assert (len(heldout), len(train)) == (500, 9500)
    assert warm_start == train
    assert not heldout & train


def test_answers_are_right_and_nearly_half_of_the_warm_start_is_wrong(example: dict[str, Any]) -> None:
    truths = {row["prompt"]: row["ground_truth"] for row in example["train"]()}
    assert truths["12+34="] == "046"
    assert all(len(truth) == 3 and int(truth) == int(text[:2]) + int(text[3:5]) for text, truth in truths.items())
    rows = list(example["warm_start"]())
    wrong = sum(row["response"] != truths[row["prompt"]] for row in rows) / len(rows)
    assert 0.44 < wrong < 0.46
    assert all(len(row["response"]) == 3 for row in rows)
    assert rows == list(example["warm_start"]())


def test_the_reward_is_for_the_exact_answer(example: dict[str, Any]) -> None:
    score = example["compute_score"]
    assert score("052", "052") == 1.0
    assert score("52", "052") == score("052 ", "052") == score("", "052") == 0.0
