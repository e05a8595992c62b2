"""What a reward function is given, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One response and what is needed to judge it. `ground_truth` and `extra_info` may be any Python object."""

    response: str
    prompt: str = ""
    ground_truth: Any = None
    data_source: str = ""
    extra_info: Any = None


@dataclass(frozen=True)
class Score:
    """The reward of one response. `value` is None if and only if there is none; then `error` says why.

    `metrics` holds further numbers by name (`reward/...`), to be averaged over the responses that have them.
    `output` is the end of what was printed during the call; calls of an async function share one worker, so it may
    hold lines of its neighbours.
    """

    value: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    output: str = ""

    @property
    def problem(self) -> str | None:
        """Why there is no reward, with what the function had printed; None where there is one."""
        if self.error is None or not self.output:
            return self.error
        return f"{self.error}\nprinted: {self.output.rstrip()}"
