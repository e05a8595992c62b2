"""N workers called as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")


class WorkerGroup(Protocol[W]):
    """Calls a method of the worker class on every rank: `group.call(Worker.update, batch)`.

    The method itself is handed over, not its name: a reader can follow it, and a type checker checks the arguments.
    """

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `method` and return its result."""
        ...

    def stream(
        self, method: Callable[Concatenate[W, P], Iterator[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[R]:
        """Run a method that yields, and yield what it yields as it comes."""
        ...
