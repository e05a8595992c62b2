"""Which side has the device: a state machine of three states.

idle -> rollout -> idle        the engine is awake: weights and KV cache, no gradients
idle -> train   -> idle        the trainer works: weights, gradients, optimizer state, no KV cache
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

from tandem.errors import PhaseError

Phase = Literal["idle", "rollout", "train"]


class Watch(Protocol):
    """Somebody who wants to know how long things take, and what else the workers measure."""

    def timing(self, name: str) -> AbstractContextManager[None]:
        """A context that is held during a piece of work of this name."""
        ...

    def record(self, name: str, value: float | None) -> None:
        """Take in a metric of one rank; None = it could not be measured."""
        ...


class Unwatched:
    """A `Watch` that does nothing."""

    def timing(self, name: str) -> AbstractContextManager[None]:
        """See `Watch`."""
        return nullcontext()

    def record(self, name: str, value: float | None) -> None:
        """See `Watch`."""


class PhaseMachine:
    """Knows the current phase and refuses what is not legal in it."""

    def __init__(self) -> None:
        self.current: Phase = "idle"

    def check_between(self, what: str) -> None:
        """Raise PhaseError within a phase: the device has no room for what comes between them."""
        if self.current != "idle":
            raise PhaseError(
                f"cannot {what} inside of the {self.current} phase",
                remedy=f"do it after the `with workers.{self.current}_phase()` block",
            )

    @contextmanager
    def enter(self, phase: Phase) -> Generator[None]:
        """Be in `phase` for the length of a block.

        Raises:
            PhaseError: Another phase is still open.
        """
        if self.current != "idle":
            raise PhaseError(
                f"cannot enter the {phase} phase inside of the {self.current} phase",
                remedy=f"end the `with workers.{self.current}_phase()` block first: both need the device's memory",
            )
        self.current = phase
        try:
            yield
        finally:
            self.current = "idle"


class PhaseHandle:
    """What a phase block hands out; it works inside of its block only."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._open = True

    def close(self) -> None:
        """The block has ended."""
        self._open = False

    def check_open(self) -> None:
        """Raise PhaseError after the block has ended."""
        if not self._open:
            raise PhaseError(
                f"this {self._phase} phase has ended",
                remedy=f"make the call inside of a `with workers.{self._phase}_phase()` block",
            )
