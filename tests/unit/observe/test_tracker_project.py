"""What the trackers with projects are told. Neither package is installed, so a small one stands in for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.config.tracking import TrackingConfig
from tandem.observe.trackers import start_trackers

STAND_IN = """
import json, pathlib

class Run:
    def __init__(self, options):
        self.lines = [options]

    def log(self, metrics, step):
        self.lines.append([step, metrics])

    def finish(self):
        pathlib.Path({notes!r}).write_text(json.dumps(self.lines))

def init(**options):
    return Run(options)
"""


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
@pytest.mark.parametrize("project", ["tandem", "mine"])
def test_the_project_is_the_one_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, project: str
) -> None:
    packages, notes = tmp_path / "packages", tmp_path / "notes.json"
    (packages / tracker).mkdir(parents=True)
    (packages / tracker / "__init__.py").write_text(STAND_IN.format(notes=str(notes)))
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    config = TrackingConfig(to=(tracker,), project=project)
    trackers = start_trackers(config, folder=tmp_path, run_config={"a": 1}, warn=pytest.fail)
    trackers.log(3, {"reward/mean": 0.5})
    trackers.close()
    options, logged = json.loads(notes.read_text())
    assert options["project"] == project
    assert options["config"] == {"a": 1}
    assert logged == [3, {"reward/mean": 0.5}]
