"""Contract 5, for each engine: a run that was stopped and gone on with ends like one that was not."""

from __future__ import annotations

from pathlib import Path

import tandem as td
from tests.contract.engines import each_engine
from tests.loop.small_run import MODEL, differences, small_config, traces_of

NEW = {**MODEL["new"], "head_dim": 32}  # which vLLM's attention on CPUs has


def run_to(folder: Path, engine: str, steps: int) -> Path:
    """The run in this folder, gone on with up to `steps`."""
    changes = {
        "run": {"steps": steps, "folder": str(folder / "run")},
        "model": {**MODEL, "new": NEW},
        "rollout": {"engine": engine, "n": 4, "max_response_length": 4},
        "evaluation": {"data": str(folder / "train.jsonl"), "every": 1},
    }
    folder.mkdir(exist_ok=True)
    return td.train(td.config_from_dict(small_config(folder, changes)))


@each_engine
def test_stopped_and_gone_on_with_is_exact(engine: str, tmp_path: Path) -> None:
    whole = run_to(tmp_path / "whole", engine, 4)
    run_to(tmp_path / "parts", engine, 2)
    parts = run_to(tmp_path / "parts", engine, 4)
    assert not differences(traces_of(whole), traces_of(parts))
