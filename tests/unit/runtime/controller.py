"""A program that trains on a cluster of its own, and is treated badly: see test_controller.py."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

import ray

from tandem.runtime.ray import RayGroup
from tests.unit.runtime.worker import SETTINGS, Worker


def note(number: int, frame: FrameType | None) -> None:
    """Handle a signal."""
    say(signal.Signals(number).name)


def say(text: object) -> None:
    """To the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(pipe: Path, *, ends_itself: bool) -> None:
    """Say what happens, a line for each thing."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, note)
    before = dict(os.environ)
    group = RayGroup(Worker, SETTINGS, num_workers=2, device_type="cpu")
    say(f"environment as before: {os.environ == before}")
    say(ray.get_runtime_context().gcs_address)
    say(f"nice as here: {set(group.call_each(Worker.niceness)) == {os.getpriority(os.PRIO_PROCESS, 0)}}")
    say(" ".join(str(pid) for _, pid, _ in group.call_each(Worker.identity)))
    try:
        group.call(Worker.wait_for, pipe)
    except KeyboardInterrupt:
        say("interrupted")
    say(group.call(Worker.collectives)[1])
    if ends_itself:
        sys.stdin.readline()
        group.close()
    else:
        group.call(Worker.hang, pipe)


if __name__ == "__main__":
    main(Path(sys.argv[1]), ends_itself=sys.argv[2:] == ["close"])
