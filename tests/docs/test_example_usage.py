"""What the first lines of each file in examples/losses say to write, run on a tiny model."""

from __future__ import annotations

import ast
import functools
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tandem as td
from tests.docs.pages import ROOT
from tests.loop.small_run import small_config
from tests.unit.hybrid.made import contrast, rollout, start_tiny

EXAMPLES = sorted((ROOT / "examples" / "losses").glob("*.py"))
# Numbers beside the score: gdpo.py compares them.
REWARD = """
def score(response, ground_truth):
    right, short = float(ground_truth in response), float(len(response) < 3)
    return {"score": right + short, "right": right, "short": short}
"""


def usage(path: Path) -> list[ast.stmt]:
    """The statements of its docstring: the indented paragraphs from the one on that imports from the file.

    Loops are shortened.
    """
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    code = [part for part in text.split("\n\n") if part.startswith("    ")]
    first = next(number for number, part in enumerate(code) if f"from {path.stem} import " in part)
    return ast.parse("\n".join(textwrap.dedent(part) for part in code[first:]).replace("take(100)", "take(2)")).body


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[td.Workers, td.Rollouts]]:
    with start_tiny(tmp_path_factory.mktemp("models") / "tiny", lr=1e-12) as workers:
        yield workers, rollout(workers)


def run_config(folder: Path, name: str) -> dict[str, Any]:
    config = small_config(folder, {"run": {"steps": 1, "folder": name}, "checkpoint": {"every": 0}})
    (folder / "reward.py").write_text(REWARD)
    return config


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_the_file_says_to_write_runs(
    step: tuple[td.Workers, td.Rollouts], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one namespace that has what a loop has; each statement that trains gets a run of its own."""
    workers, rollouts = step
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(path.parent)
    values = rollouts.rollout_logprobs.sum(dim=1)
    rewards = td.Rewards(values=values, valid=values.isfinite(), components={"right": values, "short": -values})
    names: dict[str, Any] = {"td": td, "functools": functools, "workers": workers, "rollouts": rollouts}
    names |= {"rewards": rewards, "advantages": contrast(rollouts), "step": 1}
    names["prompts"] = td.Prompts([{"prompt": "1+1=", "ground_truth": "2"}], workers.tokenizer, per_step=1, seed=0)
    statements = usage(path)
    for number, statement in enumerate(statements):
        config = run_config(tmp_path, f"run{number}")
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        names["config"] = td.config_from_dict(config)
        code = compile(ast.Module([statement], []), str(path), "exec")
        if "trainer" in code.co_names and "train_phase" not in code.co_names:
            with workers.train_phase() as names["trainer"]:
                exec(code, names)
        else:
            exec(code, names)
    runs = list(tmp_path.glob("run*/metrics.jsonl"))
    assert len(runs) == sum("td.train(" in ast.unparse(statement) for statement in statements)
    for metrics in runs:
        (line,) = map(json.loads, metrics.read_text().splitlines())
        assert line["policy/loss"] is not None
