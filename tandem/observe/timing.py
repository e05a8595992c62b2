"""How long the parts of a step take."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from tandem.observe.metrics import METRICS

PREFIX = "timing_s/"
PARTS = tuple(name.removeprefix(PREFIX) for name in METRICS if name.startswith(PREFIX) and name != f"{PREFIX}step")


class Timing:
    """Adds up seconds by name, from one step to the next. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._start = clock()

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Add the time of the block to `timing_s/<name>`."""
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def take(self) -> dict[str, float]:
        """The seconds since the last call, as metrics, and begin anew."""
        now = self._clock()
        seconds = {"step": now - self._start, **dict.fromkeys(PARTS, 0.0), **self._seconds}
        self._start = now
        self._seconds.clear()
        return {f"{PREFIX}{name}": value for name, value in seconds.items()}
