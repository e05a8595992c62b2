"""The program of docs/library.md, on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.docs.pages import ROOT, blocks
from tests.tiny import tiny_model_folder

MODEL = "Qwen/Qwen3-0.6B"


@pytest.mark.slow
def test_the_blocks_of_the_page_are_one_program_that_runs(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path / "tiny")
    parts = [block.text for block in blocks(ROOT / "docs" / "library.md", "python")]
    assert len(parts) >= 6
    program = "\n".join(parts)
    assert MODEL in program
    (tmp_path / "program.py").write_text(
        program.replace(MODEL, "tiny").replace('"max_response_length": 256', '"max_response_length": 4')
    )
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "my-model").config.model_type == "qwen3"
