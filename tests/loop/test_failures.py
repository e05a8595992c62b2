"""Workers that die: named, replaced, and the run ends like one in which nobody died."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

import tandem as td
from tandem.algorithm.protocols import LossOutput
from tests.loop.ray_workers import workers_of
from tests.loop.small_run import (
    differences,
    exit_code,
    run_command,
    small_config,
    start_command,
    start_function,
    traces_of,
    write_config,
)

KILLS_A_WORKER = """
import os, signal
from pathlib import Path
from tests.loop.ray_workers import workers_of

FOLDER = Path({folder!r})

def score(response, ground_truth):
    mark = FOLDER / "died_in_rollout"
    if not mark.exists() and (FOLDER / "run/checkpoints/step_000001").exists():
        mark.touch()
        os.kill(workers_of(os.getppid())[1].pid, signal.SIGKILL)
    return 1.0 if ground_truth in response else response.count("1") / 8
"""
TWO_WORKERS: Mapping[str, Mapping[str, Any]] = {
    "run": {"steps": 8},
    "cluster": {"num_workers": 2, "threads": 1},
    "checkpoint": {"every": 1, "keep": 20},
}
PLACES = ("rollout", "update", "save")


@dataclass(frozen=True)
class DiesInAnUpdate(td.ClippedSurrogate):
    """The usual loss; on the second rank it once kills its own process."""

    folder: Path = Path()

    def __call__(self, **arguments: Any) -> LossOutput:
        mark = self.folder / "died_in_update"
        after = self.folder / "run/checkpoints/step_000003"
        if dist.get_rank() == 1 and after.exists() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(**arguments)


@dataclass(frozen=True)
class Raises(td.ClippedSurrogate):
    """A loss that one worker's library cannot compute."""

    def __call__(self, **arguments: Any) -> LossOutput:
        if dist.get_rank() == 1:
            raise RuntimeError("the device has run out of memory")
        return super().__call__(**arguments)


def train(config: dict[str, Any], loss: td.ClippedSurrogate) -> None:
    td.train(td.config_from_dict(config), loss=loss)


def run_in(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    config = small_config(folder, {**TWO_WORKERS, "run": {"steps": 8, "folder": str(folder / "run")}})
    (folder / "reward.py").write_text(KILLS_A_WORKER.format(folder=str(folder)))
    return config


@pytest.mark.slow
def test_fault_29_workers_killed_in_rollout_update_and_save_change_no_bit(tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    log = tmp_path / "log"
    config = run_in(undisturbed)
    for place in PLACES:
        (undisturbed / f"died_in_{place}").touch()
    process = start_function(train, log, config, DiesInAnUpdate(folder=undisturbed))
    assert exit_code(process) == 0, log.read_text()

    log = tmp_path / "log of the disturbed"
    process = start_function(train, log, run_in(disturbed), DiesInAnUpdate(folder=disturbed))
    checkpoints = disturbed / "run/checkpoints"
    while not wait([process.sentinel], timeout=0.0005):
        late = (checkpoints / "step_000004").exists() and any(checkpoints.glob("*.partial/model"))
        if late and not (disturbed / "died_in_save").exists():
            (disturbed / "died_in_save").touch()
            workers_of(process.pid)[0].kill()
    assert process.exitcode == 0, log.read_text()
    assert all((disturbed / f"died_in_{place}").exists() for place in PLACES)
    text = log.read_text()
    assert text.count("SIGKILL") >= 3, text
    assert "rank 1 of 2 has died" in text
    assert differences(traces_of(disturbed / "run"), traces_of(undisturbed / "run")) == []


@pytest.mark.slow
def test_after_max_failures_the_run_stops_with_the_workers_error(tmp_path: Path) -> None:
    config = run_in(tmp_path / "run")
    config["cluster"] = {**config["cluster"], "max_failures": 1}
    log = tmp_path / "log"
    assert exit_code(start_function(train, log, config, Raises())) != 0
    text = log.read_text()
    assert text.count("the run begins anew, as there is no checkpoint yet, with new workers") == 1, text
    assert "RuntimeError: the device has run out of memory" in text
    assert "cluster.max_failures=1" in text
    assert "RayTaskError" not in text
    assert "in __call__" in text  # where in the worker it was raised


@pytest.mark.slow
def test_a_killed_controller_leaves_no_worker_and_is_gone_on_with(tmp_path: Path) -> None:
    """That Ray's own processes end, too, is tested where nobody has to wait for it: with `runtime`."""
    folder = tmp_path / "run"
    config = run_in(folder)
    (folder / "died_in_rollout").touch()
    file, log = write_config(tmp_path / "run.yaml", config), tmp_path / "log"
    process = start_command(["train", str(file)], log)
    while not (folder / "run/checkpoints/step_000002").exists():
        assert not wait([process.sentinel], timeout=0.01), log.read_text()
    workers = workers_of(process.pid)
    assert len(workers) == 2
    process.kill()
    process.join()
    _, left = psutil.wait_procs(workers, timeout=10)
    assert not left
    assert run_command(["train", str(file)], log) == 0, log.read_text()  # while Ray's own processes still end
    assert "going on after step" in log.read_text()
    assert (folder / "run/checkpoints/step_000008").exists()
