"""The thread that hands jobs to worker processes, watches their time and replaces those that must be killed."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from tandem.errors import RewardError
from tandem.rewards.board import Board
from tandem.rewards.messages import Failed, Finished, ProtocolError, Ready, Reply, Started
from tandem.rewards.outcome import timed_out
from tandem.rewards.process import WorkerProcess, worker_environment
from tandem.rewards.sample import Score

LOAD_TIMEOUT_S = 120.0  # to start Python and import the user's file; also to begin with a job that was sent
ASYNC_GRACE_S = 0.5  # an event loop keeps its own time limits; it is killed when it is this late with one
MAX_TRIES = 3  # for a job whose worker died before the function was called, and to replace a worker
LONGEST_WAIT_S = 3600.0  # the system's wait takes no more than some weeks


@dataclass
class Job:
    """One call of the function: `tickets` are the samples it scores, `message` is what the worker is sent."""

    number: int
    tickets: tuple[int, ...]
    message: bytes
    alone: bool = False  # its worker died with several calls in flight: tried again without company
    tries: int = 0
    sent: float = 0.0
    started: float | None = None
    mark: int = 0  # bytes that its worker had printed before it


@dataclass(eq=False)
class Seat:
    """A worker with the jobs in its hands."""

    process: WorkerProcess
    capacity: int
    load_deadline: float
    loaded: bool = False
    retired: bool = False  # not fit for another job
    jobs: dict[int, Job] = field(default_factory=dict)


class Dispatcher:
    """Runs in one thread, which owns all workers; the other threads use `submit` and `stop` only."""

    def __init__(self, setup: bytes, board: Board, *, workers: int, concurrency: int, timeout_s: float) -> None:
        """`setup` is the frame that each new worker is sent; scores go to `board`."""
        self._setup = setup
        self._board = board
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._folder = os.getcwd()
        self._environment = worker_environment(os.environ, sys.path)
        self._shares = [len(range(place, concurrency, workers)) for place in range(workers)]
        self._asynchronous = False
        self._incoming: deque[Job] = deque()  # append and popleft are safe between threads
        self._again: deque[Job] = deque()
        self._seats: list[Seat] = []
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._stopping = False
        self._opened = False
        self._failed_loads = 0  # in a row, of workers that were to replace others

    def submit(self, job: Job) -> None:
        """Queue a job. From any thread."""
        self._incoming.append(job)
        self._ring()

    def stop(self) -> None:
        """Have `run` kill the workers and return. From any thread."""
        self._stopping = True
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # full: it will wake up anyway; closed: it has ended
            self._ringer.send(b"!")

    def run(self) -> None:
        """The thread's work, until `stop` or a failure, which goes to the board."""
        self._selector.register(self._bell, selectors.EVENT_READ, self._hear_bell)
        failure = RewardError("the reward pool broke down", remedy="please report the traceback printed above")
        try:
            for place in range(len(self._shares)):
                self._seats.append(self._new_seat(place))
            while not self._stopping:
                self._hand_out()
                for key, _ in self._selector.select(self._time_left()):
                    action: Callable[[], None] = key.data
                    action()
                self._check_time()
            failure = RewardError("the reward pool is closed", remedy="gather the scores before you close it")
        except RewardError as error:
            failure = error
        finally:
            for seat in self._seats:
                seat.process.kill()
            self._selector.close()
            self._bell.close()
            self._ringer.close()
            self._board.fail(failure)

    def _new_seat(self, place: int) -> Seat:
        process = WorkerProcess(self._setup, self._environment, self._folder)
        seat = Seat(process, self._shares[place], load_deadline=time.monotonic() + LOAD_TIMEOUT_S)
        self._selector.register(process.connection, selectors.EVENT_READ)
        self._watch(seat)
        self._selector.register(process.stdout, selectors.EVENT_READ, partial(self._read_output, seat))
        return seat

    def _hear_bell(self) -> None:
        with suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass

    def _read_output(self, seat: Seat) -> None:
        if seat in self._seats and seat.process.stdout_open:  # not replaced by what came before in the same round
            seat.process.read_output()
            if not seat.process.stdout_open:
                self._selector.unregister(seat.process.stdout)

    def _attend(self, seat: Seat) -> None:
        """Exchange messages with a worker."""
        if seat not in self._seats:
            return
        seat.process.send_more()
        try:
            for reply in seat.process.receive():
                self._hear(seat, reply)
        except ProtocolError:
            self._replace(seat, "the worker's connection was written to by the reward function")
        if seat not in self._seats:
            return
        if seat.retired:
            self._replace(seat, None, innocent=True)
        elif seat.process.hung_up:
            self._replace(seat, None)
        else:
            self._watch(seat)

    def _watch(self, seat: Seat) -> None:
        """Wake up when its worker has said something, and when it can take what could not be sent to it yet."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if seat.process.has_unsent else 0)
        self._selector.modify(seat.process.connection, events, partial(self._attend, seat))

    def _hear(self, seat: Seat, reply: Reply) -> None:
        match reply:
            case Failed():
                raise RewardError(reply.message, remedy=reply.remedy)
            case Ready():
                seat.loaded, self._asynchronous, self._failed_loads = True, reply.asynchronous, 0
                if not self._opened and all(other.loaded for other in self._seats):
                    self._opened = True
                    self._board.open()
            case Started() if reply.number in seat.jobs:
                seat.jobs[reply.number].started = time.monotonic()
            case Finished() if reply.number in seat.jobs:
                job = seat.jobs[reply.number]
                if len(reply.scores) != len(job.tickets):
                    raise ProtocolError
                del seat.jobs[reply.number]
                self._read_output(seat)
                output = seat.process.output_since(job.mark)
                scores = [replace(score, output=output) for score in reply.scores]
                self._board.put(dict(zip(job.tickets, scores, strict=True)))
                seat.retired = seat.retired or reply.retire
            case _:
                pass  # for a job that it does not have: the user's code may write what it likes

    def _hand_out(self) -> None:
        """Give jobs to the workers with the fewest; those to be tried again first, each to an idle worker."""
        while queue := self._again or self._incoming:
            free = [seat for seat in self._seats if seat.loaded and len(seat.jobs) < self._capacity(seat)]
            if queue is self._again:
                free = [seat for seat in free if not seat.jobs]
            if not free:
                return
            seat, job = min(free, key=lambda seat: len(seat.jobs)), queue.popleft()
            seat.jobs[job.number] = job
            self._read_output(seat)
            job.sent, job.mark = time.monotonic(), seat.process.num_printed
            seat.process.send(job.message)
            self._watch(seat)

    def _capacity(self, seat: Seat) -> int:
        if not self._asynchronous:
            return 1
        return min(1, seat.capacity) if any(job.alone for job in seat.jobs.values()) else seat.capacity

    def _deadline(self, job: Job) -> float:
        if job.started is None:
            return job.sent + self._timeout_s + LOAD_TIMEOUT_S
        return job.started + self._timeout_s + (ASYNC_GRACE_S if self._asynchronous else 0.0)

    def _time_left(self) -> float | None:
        """Seconds until the next deadline; None if nothing is under way."""
        deadlines = [seat.load_deadline for seat in self._seats if not seat.loaded]
        deadlines += [self._deadline(job) for seat in self._seats for job in seat.jobs.values()]
        return min(max(0.0, min(deadlines) - time.monotonic()), LONGEST_WAIT_S) if deadlines else None

    def _check_time(self) -> None:
        now = time.monotonic()
        for seat in list(self._seats):
            if not seat.loaded and now >= seat.load_deadline:
                raise RewardError(
                    f"a reward worker has not loaded the function within {LOAD_TIMEOUT_S:g} s",
                    remedy="move slow work from the file's top level into the function, or reduce reward.workers",
                )
            if any(now >= self._deadline(job) for job in seat.jobs.values()):
                self._replace(seat, timed_out(self._timeout_s).error)

    def _replace(self, seat: Seat, reason: str | None, *, innocent: bool = False) -> None:
        """Kill a worker and start another in its place.

        The job that it was running gets no score, because of `reason` (None: however the process ended). If there
        were several, it is not known whose fault it was: each is tried again with a worker to itself. `innocent`:
        none of them is at fault.
        """
        self._selector.unregister(seat.process.connection)
        if seat.process.stdout_open:
            self._selector.unregister(seat.process.stdout)
        ending = seat.process.kill()
        self._failed_loads += self._opened and not seat.loaded
        if not seat.loaded and (not self._opened or self._failed_loads >= MAX_TRIES):
            output = seat.process.output_since(0)
            raise RewardError(
                f"a reward worker {ending} while it loaded the function{': ' + output if output else ''}",
                remedy="reward.memory_gib may be too small; or the file ends the process when it is imported",
            )
        running = [job for job in seat.jobs.values() if job.started is not None]
        clear = len(running) == 1 and not innocent
        for job in seat.jobs.values():
            job.tries += 1
            if job.tries >= MAX_TRIES or (clear and job is running[0]):
                self._give_up(seat, job, reason or f"the worker process {ending} during the call")
            else:
                job.alone = job.alone or job.started is not None
                job.started = None
                self._again.append(job)
        place = self._seats.index(seat)
        self._seats[place] = self._new_seat(place)

    def _give_up(self, seat: Seat, job: Job, reason: str) -> None:
        score = Score(None, error=reason, output=seat.process.output_since(job.mark))
        self._board.put(dict.fromkeys(job.tickets, score))
