"""What runs in a worker's process on Ray: one rank."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from tandem.model.ranks import Ranks
from tandem.runtime.answer import Answer, Raised
from tandem.runtime.local import ComputeSettings
from tandem.runtime.place import Place
from tandem.runtime.process_group import join_process_group, open_meeting
from tandem.runtime.watchdog import end_with


class RankProcess:
    """Makes the worker of one rank, and runs its methods. Calls and answers are pickled by us: see `Answer`."""

    _worker: object
    _settings: ComputeSettings

    def __init__(self) -> None:
        self._meeting: dist.TCPStore | None = None

    def attach(self, lifeline: tuple[str, int], folder: str) -> Answer:
        """End with the controller from now on; work in its folder, so that relative paths mean the same. The place."""

        def attach() -> Place:
            end_with(lifeline)
            if Path(folder).is_dir():
                os.chdir(folder)
            return Place.here()

        return _answer(attach)

    def open_meeting(self, size: int) -> Answer:
        """Have this process serve the place where the ranks find each other: its address."""

        def open_it() -> tuple[str, int]:
            host = ray.util.get_node_ip_address()
            self._meeting = open_meeting(host, size)
            return host, self._meeting.port

        return _answer(open_it)

    def start(
        self,
        ranks: Ranks,
        meeting: tuple[str, int] | None,
        device_type: str,
        settings: ComputeSettings,
        make_worker: bytes,
    ) -> Answer:
        """Join the process group and make the worker."""
        self._settings = settings

        def start() -> None:
            with settings.applied():
                if meeting is not None:
                    host = ray.util.get_node_ip_address()
                    join_process_group(ranks, self._meeting or meeting, device_type=device_type, host=host)
                [make] = pickle.loads(make_worker)
                self._worker = make(ranks)

        return _answer(start)

    def call(self, call: bytes, *, needs_value: bool, beside: bool) -> Answer:
        """Run a method. `beside` other calls it leaves their settings as they are, which are the process's.

        Only the number of threads belongs to each thread (OpenMP's does).
        """

        def run() -> object:
            if beside:
                torch.set_num_threads(self._settings.threads)
            with nullcontext() if beside else self._settings.applied():
                method, args, kwargs = pickle.loads(call)
                value = method(self._worker, *args, **kwargs)
                return value if needs_value else None

        return _answer(run)

    def stream(self, call: bytes) -> Iterator[Answer]:
        """Run a method that yields."""
        items = self._items(call)
        while (answer := _answer(lambda: next(items, None))) != Answer():
            yield answer

    def _items(self, call: bytes) -> Iterator[object]:
        with self._settings.applied():
            method, args, kwargs = pickle.loads(call)
            yield from method(self._worker, *args, **kwargs)


def _answer(work: Callable[[], object]) -> Answer:
    try:
        return Answer.of(work())
    except BaseException as error:  # noqa: BLE001
        # Whatever it is, it belongs to the controller, which knows of all ranks. SystemExit and KeyboardInterrupt, too:
        # Ray would take the first for the end of this process, the second for a cancelled task.
        own = error.__traceback__
        while own is not None and own.tb_next is not None and own.tb_frame.f_code.co_filename == __file__:
            own = own.tb_next
        return Answer(raised=Raised.of(error.with_traceback(own)))  # seen from the method on
