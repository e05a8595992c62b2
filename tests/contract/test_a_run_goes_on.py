"""Contract 5, for each engine: a run that was stopped and gone on with ends like one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tandem as td
from tests.contract.engines import NEEDS_VLLM, TOLERANCE, each_engine
from tests.loop.small_run import MODEL, differences, metrics_of, run_command, small_config, traces_of, write_config

NEW = {**MODEL["new"], "head_dim": 32, "num_key_value_heads": 2}  # which vLLM's attention on CPUs has


def config_of(folder: Path, engine: str, steps: int) -> dict[str, dict[str, Any]]:
    """Of the run in this folder."""
    folder.mkdir(exist_ok=True)
    changes = {
        "run": {"steps": steps, "folder": str(folder / "run")},
        "model": {**MODEL, "new": NEW},
        "rollout": {"engine": engine, "n": 4, "max_response_length": 4},
        "evaluation": {"data": str(folder / "train.jsonl"), "every": 1},
    }
    return small_config(folder, changes)


def run_to(folder: Path, engine: str, steps: int) -> Path:
    """The run in this folder, gone on with up to `steps`."""
    return td.train(td.config_from_dict(config_of(folder, engine, steps)))


@each_engine
def test_stopped_and_gone_on_with_is_exact(engine: str, tmp_path: Path) -> None:
    whole = run_to(tmp_path / "whole", engine, 4)
    run_to(tmp_path / "parts", engine, 2)
    parts = run_to(tmp_path / "parts", engine, 4)
    assert not differences(traces_of(whole), traces_of(parts))


@NEEDS_VLLM
@pytest.mark.slow
def test_vllm_on_ray(tmp_path: Path) -> None:
    """Two ranks that have a slice each: a whole run, with log-probs of the old policy taken twice."""
    config = config_of(tmp_path / "ray", "vllm", 2)
    config["rollout"]["tensor_parallel"] = config["cluster"]["num_workers"] = 2
    config["algorithm"] = {"old_logprobs": "recompute"}
    log = tmp_path / "log"
    assert run_command(["train", str(write_config(tmp_path / "run.yaml", config))], log) == 0, log.read_text()
    before, *lines = metrics_of(tmp_path / "ray" / "run")
    assert [before["step"], *(line["step"] for line in lines)] == [0, 1, 2]
    assert all(0 < line["mismatch/logprob_diff_max"] < TOLERANCE for line in lines)
    assert all(line["policy/grad_norm"] > 0 for line in lines)
