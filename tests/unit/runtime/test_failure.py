"""Which of several errors is the cause."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    ObjectStoreFullError,
    RayError,
    RayTaskError,
)

from tandem.errors import WorkerError
from tandem.runtime.failure import Failure
from tandem.runtime.place import Place, node_by_node

HERE = Place("node", "10.0.0.1", socket.gethostname(), pid=17, log="/no/such/file", out_of_memory_kills=2**60)
SYSTEM_ERROR = "The actor is dead. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits"


def test_a_death_comes_before_an_error_and_both_before_what_they_do_to_peers() -> None:
    lost = Failure(0, RuntimeError("Connection closed by peer"))
    error = Failure(2, ValueError("no"))
    later_error = Failure(3, ValueError("no"))
    death = Failure.by_ray(4, 5, HERE, ActorDiedError())
    assert sorted([lost, later_error, death, error], key=Failure.order) == [death, error, later_error, lost]
    assert lost.patience_s > error.patience_s


def test_a_death_names_rank_process_and_machine() -> None:
    error = Failure.by_ray(1, 2, HERE, ActorDiedError()).error
    assert isinstance(error, WorkerError)
    assert f"rank 1 of 2 has died (process 17 on {HERE.host_name}, 10.0.0.1)" in str(error)


def test_what_ray_knows_is_told() -> None:
    known = SYSTEM_ERROR.replace("SYSTEM_ERROR", "NODE_OUT_OF_MEMORY")
    assert HERE.reason_of_death(known) == "NODE_OUT_OF_MEMORY: Worker unexpectedly exits"
    known = "The actor died unexpectedly.\n\tclass_name: RankProcess\n\tpid: 17\nIt was evicted.\n"
    assert HERE.reason_of_death(known) == "It was evicted."


@pytest.mark.parametrize(
    "known", ["The actor died because its node has died.", "SYSTEM_ERROR Owner's node has crashed"]
)
def test_the_end_of_rays_own_process_is_told_as_that(known: str) -> None:
    assert HERE.reason_of_death(known).startswith(f"Ray's own process on {HERE.host_name} has ended")


@pytest.mark.parametrize(
    ("error", "is_death"),
    [
        (ActorDiedError(), True),
        (ActorUnavailableError("not there", None), True),
        (NodeDiedError("gone"), True),
        (ActorDiedError(RayTaskError("make", "No module named tandem", ImportError())), False),
        (RayTaskError("call", "No module named tandem", ImportError()), False),
        (ObjectStoreFullError("full"), False),
    ],
)
def test_not_every_error_of_ray_is_a_death(error: RayError, is_death: bool) -> None:
    failure = Failure.by_ray(1, 2, HERE, error)
    assert failure.is_death == isinstance(failure.error, WorkerError) == is_death
    if not is_death:
        assert str(failure.error).startswith(f"no answer of rank 1: {type(error).__name__}: ")


def test_a_crash_is_found_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text('noise\nFatal Python error: Aborted\n\nStack:\n  File "x.py", line 1\n\nExtension modules: a, b\n')
    reason = replace(HERE, log=str(log)).reason_of_death(SYSTEM_ERROR)
    assert reason == 'it has crashed: Aborted\n\nStack:\n  File "x.py", line 1'


def test_a_lack_of_memory_is_told_if_the_kernel_has_killed_since() -> None:
    assert "SIGKILL" in HERE.reason_of_death(SYSTEM_ERROR)
    assert "lack of memory" in replace(HERE, out_of_memory_kills=-1).reason_of_death(SYSTEM_ERROR)


def test_of_another_machine_nothing_is_guessed() -> None:
    assert replace(HERE, host_name="elsewhere").reason_of_death(SYSTEM_ERROR) == "it was killed or has crashed"


def test_ranks_of_one_node_follow_each_other() -> None:
    places = [replace(HERE, node=node) for node in ("b", "a", "b", "c", "a")]
    assert node_by_node(places) == [0, 2, 1, 4, 3]
