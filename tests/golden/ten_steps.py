"""Ten steps of a tiny run, whose loss and gradient norm a refactor must not touch.

    python -m tests.golden.ten_steps        writes ten_steps.json anew, after a change of the numbers that is meant

The run has a bit of everything: two epochs of mini-batches, clipping, a KL and an entropy term, a chat template.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tandem as td
from tests.tiny import addition_rows, tiny_model_folder, write_verl_parquet

STEPS = 10
NAMES = ("policy/loss", "policy/grad_norm", "policy/kl", "policy/entropy", "policy/clip_fraction", "reward/mean")
RECORD = Path(__file__).with_name("ten_steps.json")
REWARD = Path(__file__).parents[1] / "parity" / "notes_reward.py"


def run(folder: Path) -> list[dict[str, float]]:
    """Make model and data in `folder`, train, return `NAMES` of each step."""
    config = td.config_from_dict(
        {
            "run": {"folder": folder / "run", "steps": STEPS},
            "model": {"path": tiny_model_folder(folder / "model")},
            "data": {
                "train": write_verl_parquet(folder / "train.parquet", addition_rows(20)),
                "prompts_per_step": 4,
                "max_prompt_length": 64,
            },
            "rollout": {"n": 4, "max_response_length": 8, "temperature": 0.9},
            "reward": {"function": f"{REWARD}:compute_score", "workers": 1},
            "algorithm": {
                "reference": tiny_model_folder(folder / "reference", scale=4.9),
                "normalize_std": "group",
                "kl_coef": 0.05,
                "entropy_coef": 0.01,
            },
            "trainer": {"lr": 3e-4, "warmup_steps": 0, "mini_batch_responses": 8, "update_epochs": 2},
            "checkpoint": {"every": 0},
            "tracking": {"rollouts_every": 0},
            "cluster": {"threads": 1},
        }
    )
    lines = (td.train(config) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: json.loads(line)[name] for name in NAMES} for line in lines]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        RECORD.write_text(json.dumps(run(Path(folder)), indent=1) + "\n", encoding="utf-8")
