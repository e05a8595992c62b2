"""A whole run with a correction on two workers of Ray's, each of which samples with an engine of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.engines import NEEDS_VLLM, folder_of
from tests.loop.small_run import metrics_of, run_command, small_config, write_config

RANGES = {
    "token_tis": [0.0, 1.0],
    "sequence_mask": [0.995, 1.005],
}  # narrow: bfloat16 is 0.003 to 0.006 off in the mean


def step_of(folder: Path, model: Path, engine: str, correction: str, num_workers: int) -> dict[str, Any]:
    """The metrics of the one step of a run in bfloat16."""
    folder.mkdir()
    changes = {
        "run": {"steps": 1},
        "model": {"path": str(model), "new": None, "tokenizer": None, "dtype": "bfloat16"},
        "rollout": {"engine": engine, "n": 8, "max_response_length": 8, "max_concurrent": 32},
        "algorithm": {"correction": correction, "correction_range": RANGES[correction]},
        "cluster": {"num_workers": num_workers, "threads": 1},
    }
    file, log = write_config(folder / "run.yaml", small_config(folder, changes)), folder / "log"
    assert run_command(["train", str(file)], log) == 0, log.read_text()
    [line] = metrics_of(folder / "run")
    return line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "correction"),
    [("embedded", "sequence_mask"), pytest.param("vllm", "token_tis", marks=NEEDS_VLLM)],
)
def test_two_workers_correct_like_one(engine: str, correction: str, tmp_path: Path) -> None:
    """Bounds act on some tokens. Rounding depends on which rows are run together: to a twentieth."""
    model = folder_of(tmp_path / "model")
    alone = step_of(tmp_path / "alone", model, engine, correction, 1)
    two = step_of(tmp_path / "two", model, engine, correction, 2)
    assert 0.1 < alone["mismatch/share_outside"] < 0.9
    assert alone["policy/grad_norm"] > 0.01
    for name, value in alone.items():
        if value is not None and name.startswith(("mismatch/", "policy/", "reward/")):
            assert two[name] == pytest.approx(value, rel=0.05, abs=1e-5), name
