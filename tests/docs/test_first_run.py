"""The files of docs/first_run.md, on a tiny model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cli import app
from tests.docs.pages import ROOT, blocks
from tests.tiny import tiny_model_folder

SMALL = ["run.steps=2", "data.max_prompt_length=100", "rollout.max_response_length=4", "cluster.threads=1"]


@pytest.mark.slow
def test_the_files_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(ROOT / "docs" / "first_run.md", "python", "yaml"):
        name = block.text.splitlines()[0].removeprefix("# ")
        Path(name).write_text(block.text)
    assert {path.name for path in tmp_path.iterdir()} == {"make_data.py", "my_reward.py", "capitals.yaml", "read.py"}
    runpy.run_path("make_data.py")
    assert [len(Path(name).read_text().splitlines()) for name in ("train.jsonl", "heldout.jsonl")] == [18, 6]
    tiny_model_folder(Path("work/smollm2/model"))
    done = CliRunner().invoke(app, ["train", "capitals.yaml", *SMALL])
    assert done.exit_code == 0, done.output
    assert "9 prompts x 8 responses" in done.output
    capsys.readouterr()
    runpy.run_path("read.py")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2"]
    step = json.loads(Path("runs/capitals/metrics.jsonl").read_text().splitlines()[1])
    assert {"reward/right", "reward/words", "policy/clip_fraction", "rollout/truncated"} <= step.keys()
