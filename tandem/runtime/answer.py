"""What comes back from a call in another process: a value or an error, pickled."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
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
    trace: str  # as Python prints it

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """What `error` says, and itself where it can be pickled.

        One that would end the process, such as SystemExit, was for the other process to obey: here it is only told.
        """
        text = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, Exception):
            return cls(_pickled(error), text, trace)
        return cls(None, f"a worker has called for its own end: {text}", trace)

    def error(self, rank: int) -> Exception:
        """The error itself of `rank`, with its traceback there as its cause, which Python prints first.

        One that cannot be pickled is a RuntimeError that says the same.
        """
        try:
            error: Exception = RuntimeError(self.text) if self.pickled is None else pickle.loads(self.pickled)
        except _UNPICKLABLE:  # its class is in a module that only the worker has
            error = RuntimeError(self.text)
        error.__cause__ = WorkerTraceback(self.trace, rank)
        return error


@dataclass(frozen=True)
class Answer:
    """What a method returned, pickled, or what it raised."""

    value: bytes | None = None
    raised: Raised | None = None

    @classmethod
    def of(cls, value: object) -> Answer:
        """Pickle a value."""
        return cls() if value is None else cls(cloudpickle.dumps(value))

    def get(self) -> Any:
        """The value. None where there is none."""
        return None if self.value is None else pickle.loads(self.value)


class WorkerTraceback(Exception):  # noqa: N818 - it is not raised: it is shown above the error that it belongs to
    """The traceback of another process.

    Attributes:
        everywhere: All ranks have raised the same: it is not the loss of one of them, and would come again.
    """

    def __init__(self, trace: str, rank: int) -> None:
        self.trace = trace
        self.rank = rank
        self.everywhere = False
        super().__init__(trace, rank)

    @override
    def __str__(self) -> str:
        return f"in worker {self.rank}\n{self.trace.rstrip()}"


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
        text in str(error)
        for text in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
    )
