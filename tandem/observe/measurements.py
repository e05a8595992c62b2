"""What is measured while a step goes on: how long its parts take, and numbers that come from the workers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

from tandem.observe.metrics import METRICS, Reduction

PREFIX = "timing_s/"
PARTS = tuple(name.removeprefix(PREFIX) for name in METRICS if name.startswith(PREFIX) and name != f"{PREFIX}step")
RECORDED = (*(name for name in METRICS if name.startswith("memory/")), "perf/reshard_gib")

_REDUCTIONS: Mapping[Reduction, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "sum": math.fsum,
    "max": max,
    "min": min,
}


class Measurements:
    """Collects seconds and other numbers by name, from one step to the next. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._values: dict[str, list[float]] = {}
        self._start = clock()

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Add the time of the block to `timing_s/<name>`."""
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def record(self, name: str, value: float | None) -> None:
        """Take in a number of one rank; None = it could not be measured.

        Several of one name in a step, of ranks or of phases, become one by the metric's reduction.
        """
        assert name in RECORDED, name
        if value is not None:
            self._values.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        """What was measured since the last call, as metrics, and begin anew. NaN for what nobody recorded."""
        now = self._clock()
        seconds = {"step": now - self._start, **dict.fromkeys(PARTS, 0.0), **self._seconds}
        metrics = {f"{PREFIX}{name}": value for name, value in seconds.items()}
        metrics |= dict.fromkeys(RECORDED, math.nan)
        metrics |= {name: _REDUCTIONS[METRICS[name].reduction](values) for name, values in self._values.items()}
        self._start = now
        self._seconds.clear()
        self._values.clear()
        return metrics
