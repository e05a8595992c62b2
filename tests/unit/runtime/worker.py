"""A worker whose methods do one thing each, and the processes that such workers are."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tandem.errors import ModelError
from tandem.model.ranks import Ranks
from tandem.runtime.local import ComputeSettings

SETTINGS = ComputeSettings(threads=2, deterministic=True)


class UnpicklableError(Exception):
    """Holds something that cannot leave its process."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Worker:
    """Made on each rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.calls: list[str] = []

    def identity(self) -> tuple[Ranks, int, str]:
        return self.ranks, os.getpid(), os.getcwd()

    def settings(self) -> tuple[int, bool]:
        return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()

    def collectives(self) -> tuple[Tensor, list[str]]:
        own = torch.tensor([1.0, 10.0]) * (self.ranks.rank + 1)
        return self.ranks.sum(own), self.ranks.gather(f"rank {self.ranks.rank}")

    def doubled_in_place(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(2) if self.ranks.rank == 0 else torch.zeros(0)

    def count(self, up_to: int) -> Iterator[tuple[int, int]]:
        for number in range(up_to):
            yield self.ranks.rank, number

    def one_before_the_other(self, pipe: Path) -> Iterator[int]:
        """Rank 1 yields. Rank 0 yields once somebody has written into the pipe."""
        if self.ranks.rank == 0:
            pipe.read_bytes()
        yield self.ranks.rank

    def wait_for(self, pipe: Path, name: str = "") -> str:
        if self.ranks.rank == 0:
            pipe.read_bytes()
        self.calls.append(name)
        return name

    def names(self) -> list[str]:
        return self.calls

    def hang(self, pipe: Path) -> None:
        """Rank 1 says that it has begun, and waits in C code for ever; the others wait for it."""
        if self.ranks.rank == 1:
            pipe.write_bytes(b"")
            ctypes.CDLL(None).pause()
        self.ranks.sum(torch.ones(1))

    def raise_value_error(self, only: int | None = None) -> Tensor:
        if only in (None, self.ranks.rank):
            raise ValueError("no such thing")
        return self.ranks.sum(torch.ones(1))  # waits for the rank that has raised

    def exit(self, only: int) -> None:
        if self.ranks.rank == only:
            sys.exit(3)
        self.ranks.sum(torch.ones(1))

    def niceness(self) -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    def raise_model_error(self) -> None:
        raise ModelError("no such model", remedy="take another one")

    def raise_unpicklable(self) -> None:
        raise UnpicklableError("cannot leave")

    def die(self, how: str) -> None:
        """Rank 1 dies while the others wait for it."""
        if self.ranks.rank == 1:
            if how == "crash":
                ctypes.string_at(0)
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # the signal may come a moment later
        self.ranks.sum(torch.ones(1))

    def die_while_yielding(self) -> Iterator[int]:
        yield 1
        self.die("kill")

    def die_alone(self) -> None:
        if self.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()


def has_ended(pid: int, within_s: float) -> bool:
    """Wait for the end of a process that is not a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return becomes_readable(descriptor, within_s)
    finally:
        os.close(descriptor)


def becomes_readable(descriptor: int, within_s: float) -> bool:
    """Wait for it: a descriptor of `pidfd_open` is readable once its process has ended."""
    ready, _, _ = select.select([descriptor], [], [], max(0.0, within_s))
    return bool(ready)
