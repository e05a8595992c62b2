"""Which of several errors is the cause."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from ray.exceptions import ActorDiedError

from tandem.errors import WorkerError
from tandem.runtime.failure import Failure
from tandem.runtime.place import Place, node_by_node

HERE = Place("node", "10.0.0.1", socket.gethostname(), pid=17, log="/no/such/file", out_of_memory_kills=2**60)
SYSTEM_ERROR = "The actor is dead. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits"


def test_a_death_comes_before_an_error_and_both_before_what_they_do_to_peers() -> None:
    lost = Failure(0, RuntimeError("Connection closed by peer"))
    error = Failure(2, ValueError("no"))
    later_error = Failure(3, ValueError("no"))
    death = Failure.by_death(4, 5, HERE, ActorDiedError())
    assert sorted([lost, later_error, death, error], key=Failure.order) == [death, error, later_error, lost]
    assert lost.patience_s > error.patience_s


def test_a_death_names_rank_process_and_machine() -> None:
    error = Failure.by_death(1, 2, HERE, ActorDiedError()).error
    assert isinstance(error, WorkerError)
    assert f"rank 1 of 2 has died (process 17 on {HERE.host_name}, 10.0.0.1)" in str(error)


def test_what_ray_knows_is_told() -> None:
    known = SYSTEM_ERROR.replace("SYSTEM_ERROR", "NODE_OUT_OF_MEMORY")
    assert HERE.reason_of_death(known) == "NODE_OUT_OF_MEMORY: Worker unexpectedly exits"
    assert HERE.reason_of_death("its node has died\n") == "its node has died"


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
