"""Trackers: the metrics of a run in tensorboard, wandb or trackio as well.

Each tracker runs in a process of its own. Such a library may raise anything, hang when its server is down, or take the
interpreter with it; none of that may stop or slow training. Across a pipe all of it looks the same: the process is
dead, or the pipe is full. Then there is one warning and the run goes on without that tracker.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.config.tracking import TrackingConfig
from tandem.errors import ConfigError, Problem
from tandem.observe import tracker_process
from tandem.observe.metrics import Names, reported_name

MAX_WAITING_BYTES = 1 << 20  # some hundred steps: a tracker that is so far behind is taken for hung
CLOSE_TIMEOUT_S = 30.0  # to upload what is left
LAST_WORDS_S = 5.0

Warn = Callable[[str], None]


class Tracker:
    """One tracker's process and the pipe to it.

    Args:
        name: Of the tracker, for the warning.
        command: What to start; it reads JSON lines from stdin.
        log: File that gets what the process prints; its last line says why it died.
        warn: Called once, when the tracker is lost.
    """

    def __init__(self, name: str, command: Sequence[str], *, log: Path, warn: Warn) -> None:
        self.name = name
        self._log = log
        self._warn = warn
        with log.open("wb") as output:
            # In a session of its own, so that Ctrl-C reaches the run only and the tracker still gets the last step.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        assert self.process.stdin is not None
        self._pipe = self.process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._waiting = b""
        self.lost = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand a message over without waiting for it to be read."""
        if self.lost:
            return
        self._waiting += json.dumps(message, default=str).encode() + b"\n"
        self._push()
        if len(self._waiting) > MAX_WAITING_BYTES:
            self._lose("it does not keep up")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the tracker finish; after `timeout_s` seconds it is ended."""
        deadline = time.monotonic() + timeout_s
        while self._waiting and not self.lost and (left := deadline - time.monotonic()) > 0:
            select.select((), (self._pipe,), (), left)
            self._push()
        if self.lost:
            return
        self._close_pipe()
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._lose(f"it did not finish within {timeout_s:.0f} s")
        else:
            if code != 0:
                self._lose(self._last_words())

    def _push(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._pipe, self._waiting) :]
        except BlockingIOError:
            pass  # the pipe is full; the rest goes with the next message
        except BrokenPipeError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(LAST_WORDS_S)  # it is on its way out, and may still be writing why
            self._lose(self._last_words())

    def _lose(self, why: str) -> None:
        self.lost = True
        self._waiting = b""
        self.process.kill()
        self.process.wait()
        self._close_pipe()
        self._warn(
            f"{self.name} gets no more metrics: {why} (see {self._log}). Training goes on; metrics.jsonl has all."
        )

    def _close_pipe(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {self.process.returncode}")


class Trackers:
    """All trackers of a run, fed with the same metrics."""

    def __init__(self, trackers: Sequence[Tracker], names: Names) -> None:
        self._trackers = tuple(trackers)
        self._names = names

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over a step's metrics; those that were not measured are left out."""
        named = {reported_name(name, self._names): value for name, value in metrics.items() if math.isfinite(value)}
        for tracker in self._trackers:
            tracker.send({"step": step, "metrics": named})

    def go_on_after(self, step: int) -> None:
        """Say that the run goes on after a checkpoint, so that later points there may be are void."""
        for tracker in self._trackers:
            tracker.send({"step": step})

    def close(self) -> None:
        """Let all of them finish."""
        for tracker in self._trackers:
            tracker.close()


def check_trackers(config: TrackingConfig) -> None:
    """Refuse trackers that are not installed, all at once.

    Raises:
        ConfigError: A package is missing.
    """
    missing = [name for name in config.to if not _is_installed(name)]
    if missing:
        raise ConfigError(
            [
                Problem("tracking.to", f"{name} is not installed", f"pip install {name}, or leave it out")
                for name in missing
            ]
        )


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # without origin: a mere folder, such as wandb leaves behind


def start_trackers(config: TrackingConfig, *, folder: Path, run_config: dict[str, Any], warn: Warn) -> Trackers:
    """Start the trackers that the config names. Files of theirs go to `folder`/<tracker>."""
    trackers = []
    for name in config.to:
        # -P: the script's own folder must not become a place to import from.
        command = [sys.executable, "-P", str(Path(tracker_process.__file__))]
        try:
            tracker = Tracker(name, command, log=folder / f"{name}.log", warn=warn)
        except OSError as error:  # no room for another process, or for its log
            warn(f"{name} gets no metrics, it cannot be started: {error}. Training goes on; metrics.jsonl has all.")
            continue
        opening: tracker_process.Opening = {
            "tracker": name,
            "folder": str(folder / name),
            "project": config.project,
            "name": folder.resolve().name,
            "id": f"{folder.resolve().name}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}",
            "config": run_config,
        }
        tracker.send(opening)
        trackers.append(tracker)
    return Trackers(trackers, config.names)
