"""Whole runs that draw groups anew, and whole runs with greedy baselines."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandem import config_from_dict, train
from tests.loop.small_run import differences, metrics_of, run_command, small_config, start_command, traces_of
from tests.loop.small_run import write_config as written
from tests.loop.test_resume import kill_when, num_lines

STEPS = 6
# About every third group of four has contrast: some steps fill their batch, others do not.
BEGINS_WITH = """
def score(response, ground_truth):
    return {"score": float(response[:1] == "1"), "length": len(response)}
"""
RESAMPLE: dict[str, Any] = {
    "run": {"steps": STEPS},
    "data": {"prompts_per_step": 3},
    "algorithm": {"idle_groups": "resample", "max_resample": 3},
    "reward": {"overlong_buffer": 2, "overlong_penalty": 0.5},
}
PICKY = """
def score(response, ground_truth):
    if ground_truth == "2" and len(response) == 4:
        raise ValueError("too long for a 2")
    return int(ground_truth) + sum(ord(character) % 7 for character in response)
"""


def config_with(folder: Path, reward: str, changes: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    config = small_config(folder, changes)
    (folder / "reward.py").write_text(reward)
    return config


def rollouts_of(run: Path) -> list[list[dict[str, Any]]]:
    """The lines of each step's file."""
    files = sorted((run / "rollouts").glob("*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_fault_38_a_run_that_draws_groups_anew_is_killed_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    never_stopped, killed = (
        written(tmp_path / f"{name}.yaml", config_with(tmp_path / name, BEGINS_WITH, RESAMPLE))
        for name in ("never_stopped", "killed")
    )
    log = tmp_path / "log"
    assert run_command(["train", str(never_stopped)], log) == 0, log.read_text()
    run, other = tmp_path / "never_stopped" / "run", tmp_path / "killed" / "run"
    for lines in (2, 4):
        assert kill_when(start_command(["train", str(killed)], log), lambda lines=lines: num_lines(other) >= lines)
    assert run_command(["train", str(killed)], log) == 0, log.read_text()[-3000:]
    assert differences(traces_of(other), traces_of(run)) == []

    metrics, steps = metrics_of(run), rollouts_of(run)
    assert {line["rollout/batches"] for line in metrics} >= {2, 3}
    for line, responses in zip(metrics, steps, strict=True):
        groups = len({response["group"] for response in responses})
        idle, surplus = line["rollout/groups_resampled"], line["rollout/groups_surplus"]
        assert groups + idle + surplus == 3 * line["rollout/batches"]
        assert line["rollout/groups_without_contrast"] == idle
        assert line["reward/mean_kept"] != line["reward/mean"]
        assert {response["reward"] for response in responses} <= {0.0, -0.25, -0.5, 1.0, 0.75, 0.5}, "after the price"
    assert {len({r["group"] for r in responses}) for responses in steps} > {3}, "some steps have fewer groups"
    ids = [sorted({response["prompt_id"] for response in responses}) for responses in steps]
    assert all(before[-1] < after[0] for before, after in pairwise(ids)), "each step draws new prompts"
    assert re.search(r"warning: step \d: drew 3 batches, [0-2] of 3 groups have contrast", log.read_text())
    assert "\ndrawn again: groups without contrast, in at most 3 batches per step\nlong responses: " in log.read_text()


def test_a_run_with_greedy_baselines(tmp_path: Path) -> None:
    """Within a group reward minus advantage is one number, the baseline; without a baseline nothing is valid."""
    changes: dict[str, Any] = {"algorithm": {"advantage": "remax"}, "rollout": {"n": 2}, "run": {"steps": 3}}
    changes["trainer"] = {"lr": 1e-3, "warmup_steps": 0}
    run = train(config_from_dict(config_with(tmp_path / "remax", PICKY, changes)))
    baselines, without = [], 0
    for responses in rollouts_of(run):
        assert len(responses) == 8
        for group in range(4):
            rows = [response for response in responses if response["group"] == group]
            used = [row["reward"] - token for row in rows if row["valid"] for token in row["advantage"]]
            baselines += used[:1]
            assert used == pytest.approx(used[:1] * len(used), abs=1e-5)
            unlucky = [row for row in rows if row["problem"] and row["problem"].startswith("the greedy response")]
            without += bool(unlucky)
            assert not unlucky or not used
            assert all(token == 0 for row in unlucky for token in row["advantage"])
    assert len(set(baselines)) > 1
    assert without > 0
    assert sum(line["reward/invalid"] for line in metrics_of(run)) >= 2
    assert all(line["policy/grad_norm"] > 0 for line in metrics_of(run))
