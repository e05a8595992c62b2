"""Errors that Tandem raises for its users.

Each carries what is wrong and a remedy, so that the message alone is enough to go on.

    TandemError
    ├── ConfigError        one or many problems in the config, all at once (also a ValueError)
    ├── DataError          a data file, a column or a row
    ├── ModelError         a model folder, a tokenizer, an architecture
    ├── RewardError        the reward function: cannot be loaded or called, or too many responses without a reward
    ├── FunctionError      an advantage or loss function of the user's own (also a ValueError)
    ├── PhaseError         a call outside of the phase in which it is legal
    ├── CheckpointError    a checkpoint or run folder that cannot be written, read or resumed
    ├── ClusterError       workers that cannot be started: no Ray, too few devices, an address that does not answer
    ├── WorkerError        a worker's process has died
    ├── TrainingError      training cannot go on, such as non-finite updates in a row
    └── SeveralErrors      several of these at once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TandemError(Exception):
    """Base of all errors for users. `remedy` says what to do about it."""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(message if remedy is None else f"{message}\n  -> {remedy}")


class DataError(TandemError):
    """A data file, a column or a row."""


class ModelError(TandemError):
    """A model folder, a tokenizer, an architecture."""


class RewardError(TandemError):
    """The reward function cannot be loaded or called, or too many responses are without a reward."""


class FunctionError(TandemError, ValueError):
    """An advantage or a loss function of the user's own asks for, or returns, what it cannot."""


class PhaseError(TandemError):
    """A call outside of the phase in which it is legal."""


class CheckpointError(TandemError):
    """A checkpoint or run folder that cannot be written, read or resumed."""


class ClusterError(TandemError):
    """Workers that cannot be started: no Ray, too few devices, an address that does not answer."""


class WorkerError(TandemError):
    """A worker's process has died. A run goes on from its last checkpoint with new workers, up to a limit."""


class TrainingError(TandemError):
    """Training cannot go on."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong in the config: where it stands, what was given, what to do."""

    key: str
    message: str
    remedy: str | None = None
    where: str | None = None  # "run.yaml:12" or "command line"

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        remedy = f"\n      -> {self.remedy}" if self.remedy else ""
        return f"{place}{self.key}: {self.message}{remedy}"


class ConfigError(TandemError, ValueError):
    """Everything that is wrong in the config, at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{len(self.problems)} {noun} in the config:\n{lines}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        """How it is pickled: it is made from its problems."""
        return type(self), (self.problems,)


class SeveralErrors(TandemError):  # noqa: N818 - it is several
    """Several things that are wrong and do not depend on each other, at once."""

    def __init__(self, errors: Sequence[TandemError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))

    def __reduce__(self) -> tuple[type[SeveralErrors], tuple[tuple[TandemError, ...]]]:
        """How it is pickled: it is made from its errors."""
        return type(self), (self.errors,)
