"""The pool of worker processes that score responses while others are still being generated."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from types import TracebackType
from typing import Any

import cloudpickle

from tandem.config.reward import RewardConfig
from tandem.errors import RewardError
from tandem.rewards.board import Board
from tandem.rewards.dispatcher import Dispatcher, Job
from tandem.rewards.messages import Setup, frame, write_job
from tandem.rewards.sample import Sample, Score

BATCH = 32  # responses that a batched function gets in one call, as soon as there are so many

# What pickling raises for objects that cannot leave their process: locks, generators, open files, endless nesting.
_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError)


def start_rewards(config: RewardConfig, reward: Callable[..., Any] | None = None) -> RewardPool:
    """Start the worker processes and have them load the reward function.

    Args:
        config: The section `reward`.
        reward: The function itself, in place of `config.function`. It may be defined in a notebook.

    Returns:
        The pool, a context manager that ends the workers.

    Raises:
        RewardError: The function cannot be found, loaded or called; with all reasons.
    """
    return RewardPool(config, reward)


class RewardPool:
    """Scores responses in `reward.workers` processes, each of which can be killed and replaced.

    A response whose function raises, hangs, ends its process or returns no number has a score without a value; the
    others go on. The workers import no torch, and die with this process.
    """

    def __init__(self, config: RewardConfig, reward: Callable[..., Any] | None = None) -> None:
        self._batched = config.batched
        self._workers = config.workers
        self._job_numbers = count()
        self._tickets = count()
        self._open_tickets: set[int] = set()
        self._buffer: list[tuple[int, bytes]] = []
        self._board = Board()
        self._dispatcher = Dispatcher(
            frame(_pickled_setup(config, reward)),
            self._board,
            workers=config.workers,
            concurrency=config.concurrency,
            timeout_s=config.timeout_s,
        )
        # The kernel ties a worker's life to the thread that started it: the dispatcher's lives as long as the pool.
        self._thread = threading.Thread(target=self._dispatcher.run, name="tandem-rewards", daemon=True)
        self._thread.start()
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._board.wait_until_open()
            on_failure.pop_all()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, sample: Sample) -> int:
        """Have `sample` scored, and return its ticket at once. A batched function waits for `BATCH`, or `gather`."""
        ticket = next(self._tickets)
        self._open_tickets.add(ticket)
        try:
            content = cloudpickle.dumps(sample)
        except _UNPICKLABLE as error:
            problem = f"ground_truth or extra_info cannot be sent to a worker process: {error}"
            self._board.put({ticket: Score(None, error=problem)})
            return ticket
        self._buffer.append((ticket, content))
        if len(self._buffer) == (BATCH if self._batched else 1):
            self._send(self._buffer)
            self._buffer.clear()
        return ticket

    def gather(self, tickets: Sequence[int]) -> list[Score]:
        """Wait for the scores of `tickets`, in this order. Each ticket is good for one score.

        Raises:
            RewardError: The workers cannot go on, such as when the function's file has gone.
            ValueError: A ticket that is not open.
        """
        unknown = set(tickets) - self._open_tickets
        if unknown or len(set(tickets)) < len(tickets):
            raise ValueError(f"these tickets are unknown, used or given twice: {sorted(unknown) or list(tickets)}")
        self._flush()
        scores = self._board.take(tickets)
        self._open_tickets.difference_update(tickets)
        return scores

    def close(self) -> None:
        """Kill the workers, whatever they do. May be called again."""
        self._dispatcher.stop()
        self._thread.join()

    def _flush(self) -> None:
        """Send what is left for a batched function, in one call for each worker."""
        size = -(-len(self._buffer) // self._workers)
        for start in range(0, len(self._buffer), max(1, size)):
            self._send(self._buffer[start : start + size])
        self._buffer.clear()

    def _send(self, rows: Sequence[tuple[int, bytes]]) -> None:
        number = next(self._job_numbers)
        message = write_job(number, [content for _, content in rows])
        self._dispatcher.submit(Job(number, tuple(ticket for ticket, _ in rows), message))


def _pickled_setup(config: RewardConfig, reward: Callable[..., Any] | None) -> bytes:
    try:
        setup = Setup(
            function=_choice(config, reward),
            weights=config.weights,
            options=config.options,
            batched=config.batched,
            timeout_s=config.timeout_s,
            memory_bytes=int(config.memory_gib * 2**30),
        )
        return pickle.dumps(setup)
    except _UNPICKLABLE as error:
        raise RewardError(
            f"the reward function cannot be sent to a worker process: {error}",
            remedy="it must not hold locks, files or the like; or put it in a file: reward.function=file.py:name",
        ) from error


def _choice(
    config: RewardConfig, reward: Callable[..., Any] | None
) -> str | tuple[str, ...] | Mapping[str, str] | bytes:
    """What the workers load: names, or the pickled function."""
    if config.function is not None and reward is None:
        return config.function
    if config.function is None and reward is not None:
        return cloudpickle.dumps(reward)
    raise RewardError(
        "there is no reward function" if reward is None else "there are two reward functions",
        remedy="set reward.function=file.py:name (or a built-in name), or pass a Python function",
    )
