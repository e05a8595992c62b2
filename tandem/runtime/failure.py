"""What has gone wrong on a rank, and which of several such things is the cause of the others."""

from __future__ import annotations

from dataclasses import dataclass

from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)

from tandem.errors import WorkerError
from tandem.runtime.answer import is_lost_connection
from tandem.runtime.place import Place, known_reason

# What Ray raises where the process of a rank is no longer there, or its machine, with what it had answered.
_DEATHS = (RayActorError, WorkerCrashedError, LocalRayletDiedError, NodeDiedError, ObjectLostError, OutOfMemoryError)


@dataclass(frozen=True)
class Failure:
    """An error of a rank, or its death."""

    rank: int
    error: BaseException
    is_death: bool = False

    @classmethod
    def by_ray(cls, rank: int, num_workers: int, place: Place | None, error: RayError) -> Failure:
        """Instead of an answer Ray has raised `error`. `place` is None where the process has not told it yet."""
        never_made = isinstance(error, RayActorError) and error.actor_init_failed
        if never_made or not isinstance(error, _DEATHS):
            return cls(rank, RuntimeError(f"no answer of rank {rank}: {type(error).__name__}: {error}"))
        if place is None:
            message = f"a worker's process has died while it started: {known_reason(str(error))}"
            return cls(rank, WorkerError(message), is_death=True)
        message = (
            f"rank {rank} of {num_workers} has died (process {place.pid} on {place.host_name}, {place.host}): "
            f"{place.reason_of_death(str(error))}"
        )
        remedy = f"what it printed is on {place.host_name} in {place.log}"
        return cls(rank, WorkerError(message, remedy=remedy), is_death=True)

    @property
    def text(self) -> str:
        """Equal for errors that are the same."""
        return f"{type(self.error).__name__}: {self.error}"

    @property
    def patience_s(self) -> float:
        """How long to look out for its cause on other ranks: the news of a death may come after what it does."""
        return 10.0 if is_lost_connection(self.error) else 1.0

    def order(self) -> tuple[int, int]:
        """Causes come before what they cause, lower ranks before higher ones."""
        return (0 if self.is_death else 2 if is_lost_connection(self.error) else 1), self.rank
