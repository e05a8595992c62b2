"""Real processes that are ranks of one process group, kept for many tests: starting one costs three seconds.

    def test_something(ranks):                      # the fixture of tests/conftest.py
        results = ranks.run(function, 2, argument)  # function(Ranks(...), argument) on each of two processes

The function is sent by value (cloudpickle): it may be defined in a test, and imports what it needs from anywhere.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

_TIMEOUT_S = 300


class RankProcesses:
    """Processes, started when a test first needs them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        """Call `function(ranks, *args)` on `size` ranks of a new process group; the result of each.

        Raises:
            RuntimeError: It raised on a rank; with that rank's traceback. All processes are then started anew.
        """
        self._start(size)
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self._pipes[:size]):
                pipe.send_bytes(cloudpickle.dumps((function, rank, size, os.path.join(folder, "store"), args)))
            replies = [self._reply(pipe) for pipe in self._pipes[:size]]
        failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(replies) if not ok]
        if failed:
            self.close()
            raise RuntimeError("\n".join(failed))
        return [value for _, value in replies]

    def _start(self, size: int) -> None:
        while len(self._processes) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _reply(self, pipe: Connection) -> tuple[bool, Any]:
        if not pipe.poll(_TIMEOUT_S):
            return False, f"no answer within {_TIMEOUT_S} s"
        try:
            return cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return False, "the process has died"

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(pipe: Connection) -> None:
    """A rank's life: take a call, join its process group, make the call, leave, answer."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from tandem.model.ranks import Ranks

    torch.set_num_threads(1)
    while True:
        try:
            function, rank, size, store, args = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if size > 1:
                timeout = timedelta(seconds=_TIMEOUT_S)
                dist.init_process_group(
                    "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
                )
            result = function(Ranks(rank, size, size), *args)
            if size > 1:
                dist.destroy_process_group()
                _clear_sharding_prop_cache()  # it would take an equal mesh of this group for one of the next group
            answer = cloudpickle.dumps((True, result))
        except BaseException:  # noqa: BLE001 - whatever it is, the test must see it
            answer = cloudpickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
