"""New workers for a run whose workers have died: it goes on from its last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tandem.checkpoint import find_checkpoint
from tandem.config.schema import Config
from tandem.errors import ClusterError, WorkerError
from tandem.observe.console import Console
from tandem.runtime.answer import WorkerTraceback

T = TypeVar("T")

_PAUSE_S = 30.0  # a machine that was lost may come back


def outlive_workers(config: Config, run: Callable[[], T]) -> T:
    """Call `run`, and again where a worker has died meanwhile: it starts new ones and goes on where it can.

    A worker's death counts, and so does a RuntimeError in it: a lost connection, memory that has run out. Other errors,
    and those that all workers raise alike, would only come again: the first one is the last, as in one process.

    Args:
        config: Resolved.
        run: Starts workers, goes on from the run's newest checkpoint, and ends its workers, whatever happens.

    Raises:
        WorkerError, RuntimeError: More than `cluster.max_failures` in a row, without a new checkpoint between them.
    """
    if config.cluster.num_workers == 1:
        return run()
    assert config.run.folder is not None, "the config is not resolved"
    run_folder, most = Path(config.run.folder), config.cluster.max_failures
    in_a_row, seen = 0, find_checkpoint(run_folder)
    while True:
        try:
            return run()
        except (WorkerError, ClusterError, RuntimeError) as error:
            if not _is_failure(error, in_a_row):
                raise
            checkpoint = find_checkpoint(run_folder)
            in_a_row = in_a_row + 1 if checkpoint == seen else 1
            seen = checkpoint
            if in_a_row > most:
                error.add_note(
                    f"Failure {in_a_row} in a row without a new checkpoint (cluster.max_failures={most}): the run "
                    "stops. The same command goes on from its last checkpoint."
                )
                raise
            begins = "begins anew, as there is no checkpoint yet"
            goes_on = begins if checkpoint is None else f"goes on from {checkpoint.name}"
            Console().warn(
                "workers lost",
                f"{type(error).__name__}: {error}",
                f"the run {goes_on}, with new workers (failure {in_a_row} in a row, {most} are tolerated)",
            )
            if isinstance(error, ClusterError):
                time.sleep(_PAUSE_S)


def _is_failure(error: Exception, in_a_row: int) -> bool:
    """Whether it may be over with new workers. After a failure there may be too few devices for a while."""
    if isinstance(error, ClusterError):
        return in_a_row > 0
    trace = error.__cause__
    return isinstance(error, WorkerError) or (isinstance(trace, WorkerTraceback) and not trace.everywhere)
