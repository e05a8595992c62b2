"""The code of the README, run on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tandem.cli import app
from tests.docs.pages import ROOT, Block, blocks
from tests.tiny import addition_rows, tiny_model_folder, write_verl_parquet

MODEL = "Qwen/Qwen3-0.6B"
README = ROOT / "README.md"


def block(language: str, start: str) -> Block:
    (found,) = [block for block in blocks(README, language) if block.text.startswith(start)]
    return found


def replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.slow
def test_the_fifteen_lines_run(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path / "tiny")
    write_verl_parquet(tmp_path / "train.parquet", addition_rows(20))
    code = block("python", "import tandem as td").text
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 16
    (tmp_path / "loop.py").write_text(replaced(code, {MODEL: "tiny", "take(100)": "take(2)", "=256": "=4"}))
    done = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stdout.splitlines()]
    assert [step[0] for step in steps] == ["0", "1"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "my-model").config.model_type == "qwen3"


@pytest.mark.slow
def test_your_own_run_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model_folder(tmp_path / "tiny")
    row = json.loads(block("json", "{").text)
    for name in ("train.jsonl", "heldout.jsonl"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    Path("my_reward.py").write_text(block("python", "# my_reward.py").text)
    changes = {MODEL: "tiny", "prompts_per_step: 16": "prompts_per_step: 2", "length: 256": "length: 4"}
    Path("run.yaml").write_text(replaced(block("yaml", "# run.yaml").text, changes))
    small = ["run.steps=1", "data.max_prompt_length=100", "cluster.threads=1"]
    for arguments in (["train", "run.yaml", *small], ["export", "runs/run", "--to", "my-model"]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    before, step = map(json.loads, Path("runs/run/metrics.jsonl").read_text().splitlines())
    assert before["eval/pass@1"] == 0.0
    assert step["reward/words"] >= 0
    assert step["reward/invalid"] == 0
    assert Path("my-model/config.json").is_file()
