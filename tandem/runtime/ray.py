"""N ranks on Ray: a process for each device, wherever the cluster has them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import cloudpickle
import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.errors import ClusterError, TandemError, WorkerError
from tandem.model.ranks import Ranks
from tandem.runtime.answer import Answer, WorkerTraceback, is_lost_connection
from tandem.runtime.cluster import HELD, connected
from tandem.runtime.failure import Failure
from tandem.runtime.local import ComputeSettings
from tandem.runtime.place import Place, node_by_node
from tandem.runtime.rank_process import RankProcess
from tandem.runtime.watchdog import Lifeline

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")

_BESIDE = "beside"  # Ray's name for a thread of an actor: that of calls which run beside others
_INLINE_BYTES = 64 * 1024  # a larger call goes into the object store, once for all ranks
_PLACEMENT_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 300.0  # of a process that imports torch, on a machine that does much else
_END_TIMEOUT_S = 15.0


class RayGroup(Generic[W]):
    """A group of workers, each in a process and with a device of its own, in one process group of `torch.distributed`.

    Ranks are numbered node by node. All of them end with this process, however it ends.
    """

    def __init__(
        self,
        make_worker: Callable[[Ranks], W],
        settings: ComputeSettings,
        *,
        num_workers: int,
        device_type: str,
        address: str | None = None,
    ) -> None:
        """Start them, and have each make its worker.

        Args:
            make_worker: Called in each process; it is pickled, and so is what it refers to.
            settings: In force while a worker works.
            num_workers: Ranks.
            device_type: "cuda" = a GPU for each, "cuda:0" in its process; "cpu" = a CPU slot.
            address: Of the Ray cluster to join: "host:port" or "auto". None = start one here. A program that has
                called `ray.init` itself uses that.

        Raises:
            ClusterError: There is no such cluster, or no room in it.
            WorkerError: A process has died.
            Whatever `make_worker` raises.
        """
        self.num_workers = num_workers
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._actors: list[ActorHandle[Any]] = []
        self._places: list[Place] = []
        # Not a daemon: a program that ends by itself waits for its last checkpoint.
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-background")
        with ExitStack() as resources:
            is_own = resources.enter_context(connected(num_workers, device_type, address))
            group = resources.enter_context(_placed(num_workers, device_type, is_own=is_own))
            self._lifeline = Lifeline(ray.util.get_node_ip_address(), num_workers)
            resources.callback(self._end_workers)
            self._start_processes(group, device_type)
            self._make_workers(make_worker, settings, device_type)
            self._resources = resources.pop_all()

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `method` on every rank with the same arguments; return the first rank's result."""
        return self._results(self._submit(_packed(method, args, kwargs), needed=1))[0]

    def call_each(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Likewise, and return the result of every rank."""
        return self._results(self._submit(_packed(method, args, kwargs), needed=self.num_workers))

    def stream(
        self, method: Callable[Concatenate[W, P], Iterator[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[R]:
        """Run a method that yields on every rank, and yield what any of them yields, as it comes.

        Ranks whose stream is left before its end run it to its end nevertheless, and then the next call: they may
        need each other in it.
        """
        self._check_usable()
        call = _packed(method, args, kwargs)
        tasks = [actor.stream.options(num_returns="streaming").remote(call) for actor in self._actors]
        for _, answer in self._arriving(tasks):
            yield answer.get()

    def start(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run `method` on every rank beside other calls, in a thread of its own; done when it has ended on all.

        What it raises does no harm to the group.
        """
        tasks = self._submit(_packed(method, args, kwargs), needed=1, beside=True)
        return self._background.submit(lambda: self._results(tasks, beside=True)[0])

    def close(self) -> None:
        """Wait for what was started, and end the workers."""
        self._background.shutdown()
        with self._lock:
            if self._failure is None:
                self._failure = WorkerError("these workers have been closed", remedy="start new ones")
        self._resources.close()

    def _submit(self, call: bytes | ObjectRef[bytes], *, needed: int, beside: bool = False) -> list[ObjectRef[Answer]]:
        """Have every rank run it; the first `needed` ones return the result."""
        self._check_usable()
        group = {"concurrency_group": _BESIDE} if beside else {}
        return [
            actor.call.options(**group).remote(call, needs_value=rank < needed, beside=beside)
            for rank, actor in enumerate(self._actors)
        ]

    def _results(self, tasks: Sequence[ObjectRef[Answer]], *, beside: bool = False) -> list[Any]:
        answers = dict(self._arriving(tasks, beside=beside))
        return [answers[rank].get() for rank in range(len(tasks))]

    def _arriving(
        self, tasks: Sequence[ObjectRef[Answer] | ObjectRefGenerator], *, beside: bool = False
    ) -> Iterator[tuple[int, Answer]]:
        """Yield (rank, answer) as they come. Where something has failed, find out what was the cause, and raise it."""
        waiting = {task: rank for rank, task in enumerate(tasks)}
        failures: list[Failure] = []
        deadline: float | None = None
        while waiting:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(waiting), timeout=timeout)
            if not ready:
                break
            task = ready[0]
            rank = waiting.pop(task)
            ref = next(task, None) if isinstance(task, ObjectRefGenerator) else task
            if ref is None:  # the stream's end
                continue
            answer = self._answer(ref, rank)
            if not isinstance(answer, Failure):
                if ref is not task:
                    waiting[task] = rank  # behind the others, so that none has to wait for long
                if not failures:
                    yield rank, answer
                continue
            failures.append(answer)
            if answer.is_death:
                break
            if not beside:  # else no rank waits for another
                deadline = min(deadline or math.inf, time.monotonic() + answer.patience_s)
        if failures:
            self._raise_cause(failures, beside=beside)

    def _answer(self, ref: ObjectRef[Answer], rank: int) -> Answer | Failure:
        try:
            answer = ray.get(ref)
        except RayError as error:
            return Failure.by_ray(rank, self.num_workers, self._places[rank] if self._places else None, error)
        return answer if answer.raised is None else Failure(rank, answer.raised.error(rank))

    def _raise_cause(self, failures: Sequence[Failure], *, beside: bool) -> NoReturn:
        """Raise the cause, and end the workers, unless all of them stand where they stood before."""
        cause = min(failures, key=Failure.order)
        same = len(failures) == self.num_workers and len({failure.text for failure in failures}) == 1
        # What we raise ourselves we raise before or after the ranks work together. Any other error may have come in the
        # middle of it, after which they are not in step, or FSDP waits for the rest of a backward pass.
        all_the_same = same and isinstance(cause.error, TandemError)
        trace = cause.error.__cause__
        if isinstance(trace, WorkerTraceback):
            trace.everywhere = same and not is_lost_connection(cause.error)
        if not cause.is_death and (beside or all_the_same):
            raise cause.error
        with self._lock:
            if self._failure is None:
                self._failure = cause.error
                self._end_workers()
        raise self._failure

    def _check_usable(self) -> None:
        """Raise the cause again: a `finally` that calls the workers must not hide it."""
        if self._failure is not None:
            raise self._failure

    def _end_workers(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._lifeline.close(timeout_s=_END_TIMEOUT_S)

    def _start_processes(self, group: PlacementGroup, device_type: str) -> None:
        """One in each bundle, and number them node by node."""
        actor_class: Any = ray.remote(concurrency_groups={_BESIDE: 1})(RankProcess)  # pyrefly: ignore[unexpected-keyword]
        for bundle in range(self.num_workers):
            process = actor_class.options(
                num_cpus=0 if device_type == "cuda" else 1,
                num_gpus=1 if device_type == "cuda" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            self._actors.append(process.remote())
        folder = os.getcwd()
        attached: list[ObjectRef[Answer]] = [
            actor.attach.remote(self._lifeline.address, folder) for actor in self._actors
        ]
        _, late = ray.wait(attached, num_returns=self.num_workers, timeout=_START_TIMEOUT_S)
        if late:
            raise ClusterError(
                f"{len(late)} of {self.num_workers} workers have not started within {_START_TIMEOUT_S:g} s",
                remedy="install the same environment on every machine of the cluster",
            )
        places = [self._place(ref, bundle) for bundle, ref in enumerate(attached)]
        order = node_by_node(places)
        self._actors = [self._actors[bundle] for bundle in order]
        self._places = [places[bundle] for bundle in order]

    def _place(self, attached: ObjectRef[Answer], bundle: int) -> Place:
        answer = self._answer(attached, bundle)
        if isinstance(answer, Answer):
            return answer.get()
        if answer.is_death:
            raise answer.error
        if isinstance(answer.error.__cause__, WorkerTraceback):
            host, port = self._lifeline.address
            raise ClusterError(
                f"a worker cannot connect to this program, at {host}:{port}: {answer.text}",
                remedy="let the machines of the cluster reach each other by TCP, at any port",
            ) from answer.error
        raise ClusterError(
            f"a worker's process cannot be started: {answer.error}",
            remedy="install the same environment on every machine of the cluster",
        ) from answer.error

    def _make_workers(self, make_worker: Callable[[Ranks], W], settings: ComputeSettings, device_type: str) -> None:
        per_node = Counter(place.node for place in self._places)
        meeting = None
        if self.num_workers > 1:
            [meeting] = self._results([self._actors[0].open_meeting.remote(self.num_workers)])
        pickled = _packed(make_worker)
        tasks = [
            actor.start.remote(
                Ranks(rank, self.num_workers, per_node[place.node]), meeting, device_type, settings, pickled
            )
            for rank, (actor, place) in enumerate(zip(self._actors, self._places, strict=True))
        ]
        self._results(tasks)


def _packed(*call: object) -> bytes | ObjectRef[bytes]:
    """Pickled by us, once for all ranks: arrays that Ray unpickles from its store are read-only."""
    pickled = cloudpickle.dumps(call)
    return pickled if len(pickled) <= _INLINE_BYTES else ray.put(pickled)


@contextmanager
def _placed(num_workers: int, device_type: str, *, is_own: bool) -> Generator[PlacementGroup]:
    """Reserve a device for each worker, on as few nodes as possible, until the end of the block.

    Args:
        num_workers: Ranks.
        device_type: "cuda" or "cpu".
        is_own: The cluster ends with the block. Then nothing is given back: whom one would tell may have died.
    """
    name = "GPU" if device_type == "cuda" else "CPU"
    held = HELD[name]
    total = ray.cluster_resources().get(name, 0)
    if held and total - held < num_workers:  # nothing that it could wait for
        raise _no_room(num_workers, name, held)
    group = placement_group([{name: 1}] * num_workers, strategy="PACK")
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        raise _no_room(num_workers, name, held)
    HELD[name] += num_workers
    try:
        yield group
    finally:
        HELD[name] -= num_workers
        if not is_own:
            remove_placement_group(group)


def _no_room(num_workers: int, name: str, held: int) -> ClusterError:
    total, free = ray.cluster_resources().get(name, 0), ray.available_resources().get(name, 0)
    if held:
        remedy = f"close() the workers that this program has open, {held} of them, or lower cluster.num_workers"
    else:
        remedy = "end what else uses them (`ray status` shows it), or lower cluster.num_workers"
    return ClusterError(
        f"{num_workers} workers need {num_workers} {name}s, but of the cluster's {total:g} only {free:g} are free",
        remedy=remedy,
    )
