"""The data that examples/prepare_smollm2.py makes; the model itself is too large for a test."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "prepare_smollm2.py"


def test_the_hundred_sums_are_cut_in_two() -> None:
    sum_rows = runpy.run_path(str(EXAMPLE))["sum_rows"]
    train, heldout = sum_rows()
    assert (len(train), len(heldout)) == (75, 25)
    questions = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in train + heldout}
    assert len(questions) == 100
    assert questions["What is 7 + 8? Answer with the number only."] == "15"
    assert sum_rows() == (train, heldout)
