"""Whole small runs that learn, on one process and on several ranks, by `tandem train` and everything around it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import tandem as td
from tests.loop.small_run import run_command, write_config
from tests.tiny import write_jsonl

LETTERS = "abcdefgh"
REWARD = """
def score(response, ground_truth):
    return float(response[:1] == ground_truth)
"""
STEPS = 40


def learnt(folder: Path, changes: Mapping[str, Mapping[str, Any]]) -> Path:
    """The folder of a run from random weights that has ended: the response to "c=" shall begin with "c"."""
    (folder / "reward.py").write_text(REWARD)
    rows = write_jsonl(folder / "rows.jsonl", [{"prompt": f"{letter}=", "ground_truth": letter} for letter in LETTERS])
    config: dict[str, Any] = {
        "run": {"folder": str(folder / "run"), "steps": STEPS},
        "model": {
            "new": {
                "architecture": "Qwen3ForCausalLM",
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 16,
            },
            "tokenizer": {"characters": f"{LETTERS}="},
        },
        "data": {"train": str(rows), "prompts_per_step": 8, "max_prompt_length": 8},
        "rollout": {"n": 16, "max_response_length": 2},
        "reward": {"function": f"{folder / 'reward.py'}:score", "workers": 1},
        "trainer": {"lr": 3e-3, "warmup_steps": 0},
        "evaluation": {"data": str(rows), "every": 0, "n": 4},
        "checkpoint": {"every": 0},
        "tracking": {"rollouts_every": 0},
        "cluster": {"threads": 1},
    }
    for name, section in changes.items():
        config[name] |= section
    log = folder / "log"
    assert run_command(["train", str(write_config(folder / "run.yaml", config))], log) == 0, log.read_text()
    return folder / "run"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    return learnt(tmp_path_factory.mktemp("alone"), {})


def lines_of(run: Path) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Metrics before the first step, and of each step."""
    before, *steps = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return before, steps


@pytest.mark.slow
def test_a_policy_with_random_weights_learns_to_repeat_a_letter(alone: Path, tmp_path: Path) -> None:
    """From one in eight or less to nearly always; what is exported still knows it, in plain transformers."""
    before, steps = lines_of(alone)
    assert before["eval/pass@1"] < 0.3
    assert steps[-1]["eval/pass@1"] > 0.9
    assert sum(step["reward/mean"] for step in steps[-5:]) / 5 > 0.9

    workers = td.start(alone, config={"cluster": {"threads": 1}, "data": {"max_prompt_length": 8}})
    folder = workers.export(tmp_path / "export")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = [
        tokenizer.decode(model.generate(**tokenizer(f"{letter}=", return_tensors="pt"), max_new_tokens=1)[0, -1:])
        for letter in LETTERS
    ]
    assert sum(answer == letter for answer, letter in zip(found, LETTERS, strict=True)) >= 7


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "replicas"), [(2, 1), (4, 2)])
def test_ranks_learn_like_one_process(alone: Path, tmp_path: Path, num_workers: int, replicas: int) -> None:
    """The first 16 steps, in which the reward rises from 0.07 to 0.57: the same responses are right, but for a few.

    Sums over ranks are rounded in another order, so that now and then another token is drawn.
    """
    run = learnt(
        tmp_path,
        {
            "run": {"steps": 16},
            "cluster": {"num_workers": num_workers},
            "rollout": {"tensor_parallel": 2},
            "trainer": {"replicas": replicas},
        },
    )
    _, steps = lines_of(run)
    _, steps_alone = lines_of(alone)
    rewards = [step["reward/mean"] for step in steps]
    assert rewards == pytest.approx([step["reward/mean"] for step in steps_alone[:16]], abs=3 / 128)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
    assert steps[-1]["eval/pass@1"] > 0.4
