"""Ctrl-C and SIGTERM: the step under way is finished and saved; before the first step and a second time, at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint import complete_checkpoints
from tests.loop.small_run import (
    differences,
    metrics_of,
    run_command,
    small_config,
    start_command,
    traces_of,
    write_config,
)
from tests.tiny import write_jsonl

PATIENCE_S = 60.0  # then the test has failed
HANGS_ONCE = """
import os, time

def score(response, ground_truth):
    if not os.path.exists({marker!r}):
        open({marker!r}, "w").close()
        time.sleep(1000)
    return float(ground_truth in response)
"""


def small_run(folder: Path, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """A config in a folder of its own. Returns the YAML file."""
    folder.mkdir()
    return write_config(folder / "run.yaml", small_config(folder, changes))


def hanging_run(folder: Path, marker: Path, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """The same, with a reward that writes `marker` and hangs where there is none yet."""
    marker.parent.mkdir(exist_ok=True)
    marker.parent.chmod(0o777)  # the reward's process may be another user's
    reward = {"function": f"{folder / 'hangs.py'}:score", "timeout_s": 1000.0}
    file = small_run(folder, {"reward": reward, **(changes or {})})
    (folder / "hangs.py").write_text(HANGS_ONCE.format(marker=str(marker)))
    return file


def until(process: ForkServerProcess, condition: Callable[[], bool], log: Path) -> None:
    """Return when `condition` holds, which must be before the process ends."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert not wait([process.sentinel], timeout=0.005), f"it ended:\n{log.read_text()}"
        if time.monotonic() > deadline:
            process.kill()
            pytest.fail(log.read_text())


def send(process: ForkServerProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def code_of(process: ForkServerProcess) -> int | None:
    process.join(PATIENCE_S)
    code = process.exitcode
    process.kill()
    return code


def num_lines(yaml_file: Path) -> int:
    file = yaml_file.parent / "run" / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_and_the_same_command_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    seldom = {"run": {"steps": 30}, "checkpoint": {"every": 0, "keep": 1}}
    whole, stopped = small_run(tmp_path / "whole", seldom), small_run(tmp_path / "stopped", seldom)
    log = tmp_path / "log"
    process = start_command(["train", str(stopped)], log)
    until(process, lambda: num_lines(stopped) >= 3, log)
    send(process, number)
    assert code_of(process) == 0
    shown = log.read_text()
    assert f"{number.name}: finishing this step, then saving and leaving" in shown
    assert "Stopped\n" in shown
    assert "the same command goes on from the last checkpoint" in shown
    reached = metrics_of(stopped.parent / "run")[-1]["step"]
    assert 3 <= reached < 30
    assert [path.name for path in complete_checkpoints(stopped.parent / "run")] == [f"step_{reached:06d}"]
    assert run_command(["train", str(stopped)], log) == 0
    assert run_command(["train", str(whole)], log) == 0
    assert differences(traces_of(stopped.parent / "run"), traces_of(whole.parent / "run")) == []


def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    marker = tmp_path / "markers" / "called"
    file = hanging_run(tmp_path / "hangs", marker)
    log = tmp_path / "log"
    process = start_command(["train", str(file)], log)
    until(process, marker.exists, log)
    send(process, signal.SIGINT)
    until(process, lambda: "Once more to leave at once" in log.read_text(), log)
    send(process, signal.SIGINT)
    assert code_of(process) == -signal.SIGINT


def test_a_signal_during_the_warm_start_leaves_at_once(tmp_path: Path) -> None:
    answers = write_jsonl(tmp_path / "warm_start.jsonl", [{"prompt": "1+1=", "ground_truth": "2", "answer": "2"}] * 8)
    sft = {"train": str(answers), "steps": 1_000_000, "batch_size": 8}
    file = small_run(tmp_path / "warm", {"sft": sft})
    log = tmp_path / "log"
    process = start_command(["train", str(file)], log)
    until(process, lambda: "warm start ..." in log.read_text() if log.exists() else False, log)
    send(process, signal.SIGTERM)
    assert code_of(process) == 128 + signal.SIGTERM
    assert "SIGTERM: leaving; no step has begun, so there is nothing to save" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_signal_during_the_first_evaluation_leaves_at_once_and_the_same_command_begins_anew(tmp_path: Path) -> None:
    marker = tmp_path / "markers" / "called"
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [{"prompt": "1+1=", "ground_truth": "2"}] * 4)
    changes = {"evaluation": {"data": str(held_out)}}
    stopped = hanging_run(tmp_path / "stopped", marker, changes)
    log = tmp_path / "log"
    process = start_command(["train", str(stopped)], log)
    until(process, marker.exists, log)
    send(process, signal.SIGINT)
    assert code_of(process) == 128 + signal.SIGINT
    assert "there is nothing to save" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert run_command(["train", str(stopped)], log) == 0
    whole = hanging_run(tmp_path / "whole", marker, changes)  # the marker is there: it does not hang
    assert run_command(["train", str(whole)], log) == 0
    assert differences(traces_of(stopped.parent / "run"), traces_of(whole.parent / "run")) == []


def test_ctrl_c_in_a_terminal_which_reaches_the_whole_process_group(tmp_path: Path) -> None:
    file = small_run(tmp_path / "real", {"run": {"steps": 100_000}})
    command = [sys.executable, "-m", "tandem.cli", "train", str(file)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("step 2/"):
                    os.killpg(process.pid, signal.SIGINT)
                    break
            out, error = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, error
    assert all(line["reward/invalid"] == 0 for line in metrics_of(tmp_path / "real" / "run")), "the rewards live on"
    assert "SIGINT: finishing this step, then saving and leaving. Once more to leave at once." in error
    assert "Stopped\n" in out


def test_a_reader_of_the_output_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    file = small_run(tmp_path / "real", {"run": {"steps": 5}, "checkpoint": {"every": 0, "keep": 1}})
    command = [sys.executable, "-m", "tandem.cli", "train", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "starting ...\n"
        process.stdout.close()  # as `| head -1` does
        error = process.stderr.read()
    assert process.returncode == 0, error
    assert [path.name for path in complete_checkpoints(tmp_path / "real" / "run")] == ["step_000005"]
