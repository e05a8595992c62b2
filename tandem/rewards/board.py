"""Where the dispatcher's thread puts scores and the caller's thread waits for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from tandem.errors import RewardError
from tandem.rewards.sample import Score


class Board:
    """Scores by ticket, and the state of the pool."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._scores: dict[int, Score] = {}
        self._opened = False
        self._failure: RewardError | None = None

    def put(self, scores: Mapping[int, Score]) -> None:
        """Hang up scores."""
        with self._changed:
            self._scores.update(scores)
            self._changed.notify_all()

    def open(self) -> None:
        """Say that all workers have loaded the function."""
        with self._changed:
            self._opened = True
            self._changed.notify_all()

    def fail(self, failure: RewardError) -> None:
        """Say that there will be no more scores; the first reason counts."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def wait_until_open(self) -> None:
        """Wait for the workers. Raises RewardError if the function cannot be loaded."""
        with self._changed:
            self._changed.wait_for(lambda: self._opened or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def take(self, tickets: Sequence[int]) -> list[Score]:
        """Wait for the scores of `tickets`, and take them down. Raises RewardError if they will never come."""
        missing = set(tickets)

        def complete() -> bool:
            missing.difference_update(self._scores)
            return not missing or self._failure is not None

        with self._changed:
            self._changed.wait_for(complete)
            if missing and self._failure is not None:
                raise self._failure
            return [self._scores.pop(ticket) for ticket in tickets]
