"""What the pages say exists: links, commands, options, verl's keys."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tandem.cli import app
from tandem.config.load import load_config
from tandem.config.presets import PRESETS
from tandem.config.reference import render_markdown as render_config
from tandem.config.schema import SECTIONS, leaf_keys
from tandem.config.verl_names import answer
from tandem.hybrid.start import resolve_here
from tandem.hybrid.train_phase import TrainPhase
from tandem.observe.metrics import render_markdown as render_metrics
from tests.docs.pages import ROOT, blocks, pages, written_pages

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
KEY = re.compile(rf"(?<![\w./])({'|'.join(SECTIONS)})\.([a-z_0-9]+)\b(?!\()")
FILE_ENDS = {"py", "yaml", "md", "parquet", "jsonl", "json"}
VERL_ROW = re.compile(r"^\| `([\w.]+)=([^`]+)` \| (.+) \|$", re.MULTILINE)
USES_KL = {"actor_rollout_ref.actor.use_kl_loss": True}  # some values depend on others


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    files = [link.partition("#")[0] for link in links if not link.startswith(("http://", "https://", "#"))]
    missing = [name for name in files if not (page.parent / name).exists()]
    assert not missing


def test_generated_pages_are_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8").rstrip() == render_config().rstrip()
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").rstrip() == render_metrics().rstrip()


def commands(name: str) -> list[list[str]]:
    """Calls of `name` in the shell blocks of all pages, as words."""
    lines = [
        line.removeprefix("$ ").removeprefix(".venv/bin/")
        for page in written_pages()
        for block in blocks(page, "bash", "")
        for line in block.text.splitlines()
    ]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{name} ")]


def test_every_make_command_exists() -> None:
    found = commands("make")
    assert ["make", "demo"] in found
    for words in found:
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_every_tandem_command_exists_with_its_options() -> None:
    found = commands("tandem")
    assert {words[1] for words in found} >= {"train", "evaluate", "config", "export"}
    for _, command, *rest in found:
        shown = CliRunner().invoke(app, [command, "--help"])
        assert shown.exit_code == 0, command
        for option in (word for word in rest if word.startswith("--")):
            assert option in shown.output


def test_every_command_that_trains_an_example_has_a_config_that_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its overrides: not every preset suits every example."""
    monkeypatch.chdir(ROOT)
    found = [words[2:] for words in commands("tandem") if words[1] == "train" and words[2].startswith("examples/")]
    assert any("algorithm.preset" in override for _, *overrides in found for override in overrides)
    for path, *overrides in found:
        resolve_here(load_config(Path(path), overrides))


def test_every_preset_with_the_config_of_the_readme_is_accepted_as_the_page_says(tmp_path: Path) -> None:
    (described,) = (block for block in blocks(ROOT / "README.md", "yaml") if block.text.startswith("# run.yaml"))
    (tmp_path / "run.yaml").write_text(described.text)
    lines = [line for block in blocks(ROOT / "docs" / "algorithms.md", "") for line in block.text.splitlines()]
    found = [shlex.split(line)[3:] for line in lines if line.startswith("tandem train run.yaml")]
    assert len(found) == 3
    fitted = {overrides[0].partition("=")[2]: overrides for overrides in found}
    for preset in PRESETS:
        load_config(tmp_path / "run.yaml", fitted.get(preset, [f"algorithm.preset={preset}"]))


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: page.name)
def test_every_option_exists(page: Path) -> None:
    text = VERL_ROW.sub(lambda row: row[3], page.read_text(encoding="utf-8"))
    text = re.sub(r"^\$ tandem train run\.yaml actor_rollout_ref.*$", "", text, flags=re.MULTILINE)
    keys = {
        f"{section}.{name}"
        for section, name in KEY.findall(text)
        if name not in FILE_ENDS and not (section == "trainer" and hasattr(TrainPhase, name))
    }
    assert keys <= set(leaf_keys())


def test_options_in_yaml_exist() -> None:
    found = [block for page in written_pages() for block in blocks(page, "yaml")]
    assert found
    for block in found:
        for section, values in yaml.safe_load(block.text).items():
            unknown = set(values) - set(SECTIONS[section].model_fields)
            assert not unknown, f"{block.page}: {section}.{unknown}"


def test_python_in_the_pages_compiles() -> None:
    found = [block for page in written_pages() for block in blocks(page, "python")]
    assert len(found) >= 3
    for block in found:
        ast.parse(block.text, filename=block.page)


def test_verl_keys_are_answered_as_the_page_says() -> None:
    rows = VERL_ROW.findall((ROOT / "docs" / "from_verl.md").read_text(encoding="utf-8"))
    assert len(rows) > 50
    for key, value, expected in rows:
        given = answer(key, yaml.safe_load(value), USES_KL)
        assert given is not None, key
        ours = dict(setting.split("=", 1) for setting in re.findall(r"`([^`]+)`", expected))
        assert {name: yaml.safe_load(text) for name, text in ours.items()} == dict(given.settings), key
        assert set(ours) <= set(leaf_keys()), key
        assert expected.endswith(given.note), key
