"""A tracker, in a process of its own: reads JSON lines from stdin and hands them to tensorboard, wandb or trackio.

Run by path and not as a part of the package, so that it needs nothing but the tracker's own library. The first line
says what to open (`Opening`); then `{"step": 3, "metrics": {...}}` are numbers to add, and `{"step": 3}` alone says
that the run goes on after step 3. The end of stdin closes the tracker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypedDict


class Opening(TypedDict):
    """What a tracker is told at the start."""

    tracker: str
    folder: str  # where a tracker that writes files puts them
    project: str
    name: str  # of the run
    id: str  # of the run: the same when it is resumed, another for a folder of the same name elsewhere
    config: dict[str, Any]


class Writer(Protocol):
    """What the three trackers have in common."""

    def add(self, step: int, metrics: dict[str, float]) -> None: ...

    def go_on_after(self, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder, by tensorboard's own writer: torch's would import torch once more."""

    def __init__(self, opening: Opening) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(opening["folder"])

    def add(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyrefly: ignore[missing-module-attribute]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def go_on_after(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyrefly: ignore[missing-module-attribute]

        # Makes tensorboard forget the points of a killed run that lie after its checkpoint.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. It keeps the first point of a step, so the points that a resumed run repeats are ignored."""

    def __init__(self, opening: Opening) -> None:
        import wandb  # pyrefly: ignore[missing-import]

        os.makedirs(opening["folder"], exist_ok=True)  # or wandb would take a temporary one
        self._run = wandb.init(
            project=opening["project"],
            name=opening["name"],
            id=opening["id"],
            config=opening["config"],
            dir=opening["folder"],
            resume="allow",
        )

    def add(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def go_on_after(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio, which keeps its data on this machine."""

    def __init__(self, opening: Opening) -> None:
        import trackio  # pyrefly: ignore[missing-import]

        self._run = trackio.init(
            project=opening["project"], name=opening["id"], config=opening["config"], resume="allow"
        )

    def add(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def go_on_after(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


WRITERS: dict[str, Callable[[Opening], Writer]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def serve(lines: Iterable[str]) -> None:
    """Do what the lines say until there are no more. Any error ends the process; the run notices that."""
    incoming = iter(lines)
    opening: Opening = json.loads(next(incoming))
    writer = WRITERS[opening["tracker"]](opening)
    for line in incoming:
        message = json.loads(line)
        if "metrics" in message:
            writer.add(message["step"], message["metrics"])
        else:
            writer.go_on_after(message["step"])
    writer.close()


if __name__ == "__main__":
    serve(sys.stdin)
