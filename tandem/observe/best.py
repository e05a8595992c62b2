"""The evaluations of a run: the first, the best, the latest, and for how long there has been no better one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tandem.batch import Evaluation
from tandem.errors import ConfigError, Problem


class Best:
    """The best evaluation so far by `metric`, higher is better, the earlier of equals."""

    def __init__(self, metric: str, patience: int | None) -> None:
        self.metric = metric
        self.patience = patience
        self.step: int | None = None
        self.value = -math.inf
        self.without_gain = 0  # evaluations in a row that were not better than the best before them
        self.before: dict[str, float] = {}  # the metrics of the evaluation before the first step
        self.latest: dict[str, float] = {}  # the metrics of the last one
        self.latest_step = 0

    def observe(self, evaluation: Evaluation) -> bool:
        """Take note of an evaluation; True where it is the best so far.

        Raises:
            ConfigError: The evaluation has no such metric.
        """
        if self.metric not in evaluation.metrics:
            known = ", ".join(sorted(name for name in evaluation.metrics if not name.endswith("_stderr")))
            raise ConfigError([Problem("evaluation.metric", f"{self.metric} was not measured", f"use one of {known}")])
        if evaluation.step == 0:
            self.before = dict(evaluation.metrics)
        self.latest, self.latest_step = dict(evaluation.metrics), evaluation.step
        value = evaluation.metrics[self.metric]
        if value > self.value:  # never true of NaN
            self.step, self.value, self.without_gain = evaluation.step, value, 0
            return True
        self.without_gain += 1
        return False

    @property
    def patience_is_out(self) -> bool:
        """Whether so many evaluations in a row have brought no gain that the run should end."""
        return self.patience is not None and self.without_gain >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-able."""
        value = self.value if math.isfinite(self.value) else None
        return {
            "metric": self.metric,
            "step": self.step,
            "value": value,
            "without_gain": self.without_gain,
            "before": _with_null(self.before),
            "latest": _with_null(self.latest),
            "latest_step": self.latest_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned. If another metric decided then, there is no best so far."""
        self.before = _with_nan(state["before"])
        self.latest, self.latest_step = _with_nan(state["latest"]), state["latest_step"]
        if state["metric"] != self.metric:
            return
        self.step = state["step"]
        self.value = -math.inf if state["value"] is None else state["value"]
        self.without_gain = state["without_gain"]


def _with_null(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """As strict JSON can keep it, which has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _with_nan(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in metrics.items()}
