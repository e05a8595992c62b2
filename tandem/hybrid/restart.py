"""New workers for a run whose workers have died: it goes on from its last checkpoint."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tandem.checkpoint import find_checkpoint
from tandem.config.schema import Config
from tandem.errors import WorkerError
from tandem.observe.console import Console


def attempts(config: Config) -> Iterator[AbstractContextManager[None]]:
    """Attempts at one run, each to be entered: `for attempt in attempts(config): with attempt: return ...`.

    An attempt swallows the death of a worker, and what a worker's libraries raise (a lost connection, memory that has
    run out), as long as there were at most `cluster.max_failures` of them without a new checkpoint in between. One
    process has no workers that could die without it: there every error is the last.

    Args:
        config: Resolved.
    """
    assert config.run.folder is not None, "the config is not resolved"
    failures = _Failures(Path(config.run.folder), most=config.cluster.max_failures)
    while True:
        yield failures.survived() if config.cluster.num_workers > 1 else _single()


@contextmanager
def _single() -> Generator[None]:
    yield


class _Failures:
    """Counts those in a row."""

    def __init__(self, run_folder: Path, *, most: int) -> None:
        self._run_folder = run_folder
        self._most = most
        self._in_a_row = 0
        self._checkpoint: Path | None = None

    @contextmanager
    def survived(self) -> Generator[None]:
        """Swallow a failure, unless there were too many of them."""
        try:
            yield
        except (WorkerError, RuntimeError) as error:
            self._count()
            if self._in_a_row > self._most:
                error.add_note(
                    f"This was failure {self._in_a_row} in a row without a new checkpoint "
                    f"(cluster.max_failures={self._most}): the run stops here; the same command goes on."
                )
                raise
            self._tell(error)

    def _count(self) -> None:
        checkpoint = find_checkpoint(self._run_folder)
        self._in_a_row = self._in_a_row + 1 if checkpoint == self._checkpoint else 1
        self._checkpoint = checkpoint

    def _tell(self, error: Exception) -> None:
        goes_on = "starts again" if self._checkpoint is None else f"goes on from {self._checkpoint.name}"
        Console().warn(
            "workers lost",
            f"{type(error).__name__}: {error}",
            f"The run {goes_on} with new workers (failure {self._in_a_row} of at most {self._most} in a row).",
        )
