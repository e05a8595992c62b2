"""What runs in a worker's process on Ray: one rank."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import ray
import torch.distributed as dist

from tandem.model.ranks import Ranks
from tandem.runtime.answer import Answer, Catcher
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
        with Catcher() as caught:
            end_with(lifeline)
            if Path(folder).is_dir():
                os.chdir(folder)
            return Answer.of(Place.here())
        return Answer(raised=caught.raised)

    def open_meeting(self, size: int) -> Answer:
        """Have this process serve the place where the ranks find each other: its address."""
        with Catcher() as caught:
            self._meeting = open_meeting(ray.util.get_node_ip_address(), size)
            return Answer.of((ray.util.get_node_ip_address(), self._meeting.port))
        return Answer(raised=caught.raised)

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
        with Catcher() as caught, settings.applied():
            if meeting is not None:
                join_process_group(
                    ranks, self._meeting or meeting, device_type=device_type, host=ray.util.get_node_ip_address()
                )
            [make] = pickle.loads(make_worker)
            self._worker = make(ranks)
        return Answer(raised=caught.raised)

    def call(self, call: bytes, *, needs_value: bool, beside: bool) -> Answer:
        """Run a method; `beside` other calls it leaves their settings as they are, which are the process's."""
        answer = Answer()
        with Catcher() as caught, nullcontext() if beside else self._settings.applied():
            method, args, kwargs = pickle.loads(call)
            value = method(self._worker, *args, **kwargs)
            if needs_value:
                answer = Answer.of(value)
        return answer if caught.raised is None else Answer(raised=caught.raised)

    def stream(self, call: bytes) -> Iterator[Answer]:
        """Run a method that yields."""
        with Catcher() as caught, self._settings.applied():
            method, args, kwargs = pickle.loads(call)
            for item in method(self._worker, *args, **kwargs):
                yield Answer.of(item)
        if caught.raised is not None:
            yield Answer(raised=caught.raised)
