"""One rank in this process: no Ray, no process group, pdb works."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch.utils import deterministic as memory  # its switches are defined at run time

from tandem.model.ranks import ALONE, Ranks

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")


@dataclass(frozen=True)
class ComputeSettings:
    """How torch computes while a worker works. Part of the numerics: another thread count gives other last bits."""

    threads: int
    deterministic: bool

    @contextmanager
    def applied(self) -> Generator[None]:
        """Set them, and put back what the user's own program had."""
        threads = torch.get_num_threads()
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        fill: bool = memory.fill_uninitialized_memory  # pyrefly: ignore[missing-attribute]
        if threads != self.threads:
            torch.set_num_threads(self.threads)
        if self.deterministic:
            if torch.cuda.is_available():  # read by cuBLAS when it starts; there is no other way to tell it
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            # Filling fresh memory with NaN finds bugs, and costs a pass over every new tensor.
            memory.fill_uninitialized_memory = False  # pyrefly: ignore[missing-attribute]
        try:
            yield
        finally:
            if threads != self.threads:
                torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            memory.fill_uninitialized_memory = fill  # pyrefly: ignore[missing-attribute]


class LocalGroup(Generic[W]):
    """A group of one worker, in this process."""

    num_workers = 1

    def __init__(self, make_worker: Callable[[Ranks], W], settings: ComputeSettings) -> None:
        self.settings = settings
        with settings.applied():
            self.worker = make_worker(ALONE)
        # Not a daemon: a program that ends by itself waits for its last checkpoint.
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-background")

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `method` on the worker."""
        with self.settings.applied():
            return method(self.worker, *args, **kwargs)

    def call_each(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `method` on the worker: a list of one result."""
        return [self.call(method, *args, **kwargs)]

    def stream(
        self, method: Callable[Concatenate[W, P], Iterator[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[R]:
        """Yield what `method` yields. Between two items the user's own settings are in force."""
        with self.settings.applied():
            iterator = iter(method(self.worker, *args, **kwargs))
        while True:
            with self.settings.applied():
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def start(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run `method` in another thread. The settings are those of the whole process: they are left as they are."""
        return self._background.submit(method, self.worker, *args, **kwargs)

    def close(self) -> None:
        """Wait for what was started."""
        self._background.shutdown()
