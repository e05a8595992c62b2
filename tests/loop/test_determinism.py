"""The same run twice is the same to the bit, however the work around it is spread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tandem as td
from tests.loop.small_run import ROWS, differences, small_config, traces_of
from tests.tiny import write_jsonl

# Everything that has an order or draws a number: two epochs, mini-batches of single responses, KL, evaluation.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "run": {"steps": 3},
    "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01},
    "trainer": {"lr": 1e-2, "mini_batch_responses": 4, "mini_batch_shuffle": "responses", "update_epochs": 2},
    "checkpoint": {"every": 2},
    "evaluation": {"every": 2, "n": 2},
}


def run(folder: Path, **changes: Mapping[str, Any]) -> dict[str, object]:
    folder.mkdir()
    merged = {name: {**CHANGES.get(name, {}), **changes.get(name, {})} for name in {*CHANGES, *changes}}
    merged["evaluation"]["data"] = str(write_jsonl(folder / "held_out.jsonl", ROWS[::3]))
    return traces_of(td.train(td.config_from_dict(small_config(folder, merged))))


def test_the_same_run_twice_is_the_same_to_the_bit(tmp_path: Path) -> None:
    first = run(tmp_path / "first")
    assert any(name.endswith("lm_head.weight") or "embed_tokens" in name for name in first), "no weights are compared"
    assert len(first["metrics"]) == 4
    assert differences(first, run(tmp_path / "second")) == []


def test_how_rewards_and_checkpoints_are_worked_off_changes_nothing(tmp_path: Path) -> None:
    first = run(tmp_path / "first")
    other = run(tmp_path / "other", reward={"workers": 3}, checkpoint={"background": False})
    assert differences(first, other) == []


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    first = run(tmp_path / "first")
    assert "metrics" in differences(first, run(tmp_path / "other", run={"seed": 1}))
