"""What comes back from a call in another process: a value or an error, pickled."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import cloudpickle
import torch.distributed as dist
from typing_extensions import override

# What pickling raises for objects that cannot leave their process, and their classes when they are made again.
_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError, ImportError)


@dataclass(frozen=True)
class Raised:
    """An error, to be raised again by the process that called."""

    pickled: bytes | None  # None where it cannot leave its process
    text: str  # "ValueError: no such thing"
    trace: str  # as Python prints it, without the frames of the call itself

    def error(self) -> BaseException:
        """The error itself, with the other process's traceback as its cause, which Python prints first.

        One that cannot be pickled is a RuntimeError that says the same.
        """
        try:
            error: BaseException = RuntimeError(self.text) if self.pickled is None else pickle.loads(self.pickled)
        except _UNPICKLABLE:  # its class is in a module that only the worker has
            error = RuntimeError(self.text)
        error.__cause__ = WorkerTraceback(self.trace)
        return error


@dataclass(frozen=True)
class Answer:
    """What a method returned, pickled, or what it raised."""

    value: bytes | None = None
    raised: Raised | None = None

    @classmethod
    def of(cls, value: object) -> Answer:
        """Pickle a value."""
        return cls(cloudpickle.dumps(value))

    def get(self) -> Any:
        """The value. None where there is none."""
        return None if self.value is None else pickle.loads(self.value)


class WorkerTraceback(Exception):  # noqa: N818 - it is not raised: it is shown above the error that it belongs to
    """The traceback of another process."""

    def __init__(self, trace: str) -> None:
        self.trace = trace
        super().__init__(trace)

    @override
    def __str__(self) -> str:
        return f"in a worker\n{self.trace.rstrip()}"


class Catcher:
    """Keeps what the block raises, whatever it is, as `raised`: it belongs to the process that called."""

    def __init__(self) -> None:
        self.raised: Raised | None = None

    def __enter__(self) -> Catcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, GeneratorExit):
            return False
        if error is not None:
            error.__traceback__ = trace.tb_next if trace is not None and trace.tb_next is not None else trace
            lines = "".join(traceback.format_exception(error))
            self.raised = Raised(_pickled(error), "".join(traceback.format_exception_only(error)).strip(), lines)
        return True


def _pickled(error: BaseException) -> bytes | None:
    """The error as bytes, if the error that is made of them is the same."""
    try:
        pickled = cloudpickle.dumps(error)
        copy = pickle.loads(pickled)
    except _UNPICKLABLE:
        return None
    return pickled if type(copy) is type(error) and str(copy) == str(error) else None


def is_lost_connection(error: BaseException) -> bool:
    """Whether it says only that another rank is no longer there."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    )
