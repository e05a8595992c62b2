from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.ten_steps import NAMES, RECORD, STEPS, run


def test_ten_steps_have_the_numbers_on_record(tmp_path: Path) -> None:
    """A change that is meant: python -m tests.golden.ten_steps, and say why in the commit."""
    expected = json.loads(RECORD.read_text(encoding="utf-8"))
    found = run(tmp_path)
    assert len(found) == len(expected) == STEPS
    for step, (new, old) in enumerate(zip(found, expected, strict=True), start=1):
        for name in NAMES:
            assert new[name] == pytest.approx(old[name], rel=1e-5, abs=1e-7), f"step {step}: {name}"
