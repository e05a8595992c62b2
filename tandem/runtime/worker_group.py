"""N workers called as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")


class WorkerGroup(Protocol[W]):
    """Calls a method of the worker class on every rank: `group.call(Worker.update, batch)`.

    The method itself is handed over, not its name: a reader can follow it, and a type checker checks the arguments.
    What a method raises reaches the caller as it was raised. All methods raise WorkerError where a worker has died.
    After either a group of several workers is of no further use: its ranks no longer stand at the same place.
    """

    @property
    def num_workers(self) -> int:
        """Ranks."""
        ...

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `method` on every rank with the same arguments; return the first rank's result."""
        ...

    def call_each(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Likewise, and return the result of every rank."""
        ...

    def stream(
        self, method: Callable[Concatenate[W, P], Iterator[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[R]:
        """Run a method that yields on every rank, and yield what any of them yields, as it comes."""
        ...

    def start(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run `method` on every rank beside other calls, in a thread of its own; done when it has ended on all.

        Such calls run one after the other. The method must use no collectives: they would meet those of other calls.
        """
        ...

    def close(self) -> None:
        """End the workers. Calling it again does nothing."""
        ...
