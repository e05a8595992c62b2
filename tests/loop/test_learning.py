"""A whole small run that learns, by `train` and everything around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import tandem as td
from tests.tiny import write_jsonl

LETTERS = "abcdefgh"
REWARD = """
def score(response, ground_truth):
    return float(response[:1] == ground_truth)
"""


@pytest.mark.slow
def test_a_policy_with_random_weights_learns_to_repeat_a_letter(tmp_path: Path) -> None:
    """From one in eight or less to nearly always; what is exported still knows it, in plain transformers."""
    rows = [{"prompt": f"{letter}=", "ground_truth": letter} for letter in LETTERS]
    (tmp_path / "reward.py").write_text(REWARD)
    config = td.config_from_dict(
        {
            "run": {"folder": tmp_path / "run", "steps": 40},
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
            "data": {
                "train": write_jsonl(tmp_path / "rows.jsonl", rows),
                "prompts_per_step": 8,
                "max_prompt_length": 8,
            },
            "rollout": {"n": 16, "max_response_length": 2},
            "reward": {"function": f"{tmp_path / 'reward.py'}:score", "workers": 1},
            "trainer": {"lr": 3e-3, "warmup_steps": 0},
            "evaluation": {"data": tmp_path / "rows.jsonl", "every": 0, "n": 4},
            "checkpoint": {"every": 0},
            "tracking": {"rollouts_every": 0},
            "cluster": {"threads": 1},
        }
    )
    run = td.train(config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, after = lines[0]["eval/pass@1"], lines[-1]["eval/pass@1"]
    assert before < 0.3
    assert after > 0.9
    rewards = [line["reward/mean"] for line in lines[1:]]
    assert sum(rewards[-5:]) / 5 > 0.9

    workers = td.start(run, config={"cluster": {"threads": 1}, "data": {"max_prompt_length": 8}})
    folder = workers.export(tmp_path / "export")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = [
        tokenizer.decode(model.generate(**tokenizer(f"{letter}=", return_tensors="pt"), max_new_tokens=1)[0, -1:])
        for letter in LETTERS
    ]
    assert sum(answer == letter for answer, letter in zip(found, LETTERS, strict=True)) >= 7
