"""Contract 7 over whole runs: what a reward function does wrong is counted, shown, and never a silent 0."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tandem import config_from_dict, train
from tandem.errors import RewardError
from tests.loop.small_run import metrics_of, small_config
from tests.tiny import write_jsonl

MISBEHAVES = """
import os, time

def score(response, ground_truth):
    if ground_truth == "raises":
        raise KeyError("no such answer")
    if ground_truth == "hangs":
        while True:
            pass
    if ground_truth == "exits":
        os._exit(3)
    if ground_truth == "prints":
        while True:
            print("x" * 1000)
    return {"none": None, "nan": float("nan"), "text": "good"}.get(ground_truth, 1.0 if "1" in response else 0.0)
"""
EXPECTED = {  # ground truth -> what the rollouts file says of it
    "raises": "KeyError: 'no such answer'",
    "hangs": "reward.timeout_s=0.5",
    "exits": "ended with exit status 3",
    "prints": "reward.timeout_s=0.5",
    "none": "None",
    "nan": "nan",
    "text": "'good'",
}


def train_on(
    folder: Path,
    truths: Sequence[str],
    *,
    steps: int,
    reward: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    per_step: int = 4,
) -> Path:
    """Train on prompts with these ground truths, in this order, with the function above."""
    rows = [{"prompt": f"{index}=", "ground_truth": truth} for index, truth in enumerate(truths)]
    changes = {
        "run": {"steps": steps},
        "data": {"prompts_per_step": per_step, "shuffle": False},
        "rollout": {"n": 2},
        "reward": {"timeout_s": 0.5, "workers": 2, **(reward or {})},
        "checkpoint": {"every": 1, **(checkpoint or {})},
    }
    config = small_config(folder, changes)
    (folder / "reward.py").write_text(MISBEHAVES)
    write_jsonl(folder / "train.jsonl", rows)
    return train(config_from_dict(config))


def rollouts_of(run: Path, step: int) -> list[dict[str, Any]]:
    text = (run / "rollouts" / f"step_{step:06d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_fault_31_and_32_rewards_that_raise_hang_exit_print_or_are_nonsense_are_counted_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_on(tmp_path, ["good", *EXPECTED], steps=1, per_step=1 + len(EXPECTED))
    (line,) = metrics_of(run)
    assert line["reward/invalid"] == 2 * len(EXPECTED)
    for row in rollouts_of(run, 1):
        truth = row["ground_truth"]
        if truth == "good":
            assert row["valid"]
            assert row["reward"] in (0.0, 1.0)
        else:
            assert not row["valid"]
            assert row["reward"] is None
            assert row["advantage"] == 0
            assert EXPECTED[truth] in row["problem"]
    shown = capsys.readouterr().out
    assert "14 of 16 responses have no reward" in shown
    assert "KeyError: 'no such answer'" in shown
    assert "invalid rewards (1)" in shown


def test_fault_19_a_run_without_any_reward_goes_on_is_logged_and_leaves_the_weights_alone(tmp_path: Path) -> None:
    run = train_on(tmp_path, ["raises"] * 4, steps=4, reward={"max_invalid_share": 1.0})
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["reward/invalid"] == 8 for line in lines)
    assert all(line["reward/mean"] is None for line in lines)
    assert all(math.isfinite(line["policy/loss"]) for line in lines)
    earlier, last = (load_file(run / "checkpoints" / f"step_{step:06d}/model/model.safetensors") for step in (3, 4))
    assert all(bool((earlier[name] == last[name]).all()) for name in last)


def blocks(pattern: str) -> list[str]:
    """Ground truths of four prompts a step: `g`ood, `b`ad, or `h`alf of them bad."""
    kinds = {"g": ["good"] * 4, "b": ["raises"] * 4, "h": ["good", "raises"] * 2}
    return [truth for letter in pattern for truth in kinds[letter]]


def test_one_bad_step_or_two_never_stop_a_run(tmp_path: Path) -> None:
    run = train_on(tmp_path, blocks("bbgbb"), steps=5)
    assert [line["reward/invalid"] for line in metrics_of(run)] == [8, 8, 0, 8, 8]


def test_a_share_that_is_not_above_the_limit_never_stops_a_run(tmp_path: Path) -> None:
    run = train_on(tmp_path, blocks("hhhh"), steps=4)
    assert [line["reward/invalid"] for line in metrics_of(run)] == [4, 4, 4, 4]


def test_three_bad_steps_in_a_row_stop_the_run_and_name_a_sample(tmp_path: Path) -> None:
    with pytest.raises(RewardError) as caught:
        train_on(tmp_path, blocks("gbbbg"), steps=5)
    message = str(caught.value)
    assert "step 4" in message
    assert "8 of 8 responses have no reward, more than reward.max_invalid_share=0.5" in message
    assert "prompt: 12=" in message
    assert "KeyError: 'no such answer'" in message
    assert "->" in message
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_run_that_bad_rewards_ended_goes_on_after_their_last_step_and_counts_anew(tmp_path: Path) -> None:
    """No step is lost, though no checkpoint was due; what comes next is two bad steps and a good one."""
    once = {"every": 0}
    with pytest.raises(RewardError, match="step 4"):
        train_on(tmp_path, blocks("gbbbbbg"), steps=7, checkpoint=once)
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step_*")] == ["step_000004"]
    run = train_on(tmp_path, blocks("gbbbbbg"), steps=7, checkpoint=once)
    assert [line["reward/invalid"] for line in metrics_of(run)] == [0, 8, 8, 8, 8, 8, 0]


def test_bad_steps_are_counted_over_a_resume(tmp_path: Path) -> None:
    train_on(tmp_path, blocks("gbbbg"), steps=3)
    with pytest.raises(RewardError, match="step 4, the 3rd in a row"):
        train_on(tmp_path, blocks("gbbbg"), steps=5)


def test_max_invalid_share_moves_the_limit(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"more than reward.max_invalid_share=0.25"):
        train_on(tmp_path, blocks("hhh"), steps=3, reward={"max_invalid_share": 0.25})
