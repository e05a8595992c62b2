"""What happens to a group of workers when one of them fails: FAULTS 29 and its kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.errors import ClusterError, ModelError, WorkerError
from tandem.model.ranks import Ranks
from tandem.runtime.answer import WorkerTraceback
from tandem.runtime.ray import RayGroup
from tests.unit.runtime.worker import SETTINGS, Worker, has_ended

NOTICED_WITHIN_S = 10.0


def start(address: str, make_worker: Callable[[Ranks], Worker] = Worker) -> RayGroup[Worker]:
    return RayGroup(make_worker, SETTINGS, num_workers=2, device_type="cpu", address=address)


def kill_in_call(group: RayGroup[Worker]) -> None:
    group.call(Worker.die, "kill")


def kill_in_stream(group: RayGroup[Worker]) -> None:
    list(group.stream(Worker.die_while_yielding))


def kill_idle(group: RayGroup[Worker]) -> None:
    _, (_, pid, _) = group.call_each(Worker.identity)
    os.kill(pid, signal.SIGKILL)
    assert has_ended(pid, within_s=5)
    group.call(Worker.collectives)


def kill_beside(group: RayGroup[Worker]) -> None:
    """The main thread waits in a call whose rank 0 waits for rank 1, which dies in its other thread."""
    future = group.start(Worker.die_alone)
    try:
        for _ in range(10_000):
            group.call(Worker.collectives)
    finally:
        assert isinstance(future.exception(), WorkerError)


@pytest.mark.parametrize("kill", [kill_in_call, kill_in_stream, kill_beside, kill_idle])
def test_fault_29_a_killed_worker_is_named_within_seconds_and_its_peers_are_ended(
    two_nodes: str, kill: Callable[[RayGroup[Worker]], None]
) -> None:
    group = start(two_nodes)
    try:
        (_, pid_0, _), (_, pid_1, _) = group.call_each(Worker.identity)
        began = time.monotonic()
        with pytest.raises(WorkerError, match=rf"rank 1 of 2 has died \(process {pid_1} on .*SIGKILL") as raised:
            kill(group)
        assert time.monotonic() - began < NOTICED_WITHIN_S
        assert has_ended(pid_0, within_s=5)
        # Whatever is called on the way out, the cause is not hidden.
        with pytest.raises(WorkerError) as again:
            group.call(Worker.settings)
        assert again.value is raised.value
    finally:
        group.close()


def test_fault_29_a_crash_is_told_with_the_line_that_crashed(two_nodes: str) -> None:
    group = start(two_nodes)
    try:
        with pytest.raises(WorkerError, match=r"(?s)it has crashed: Segmentation fault.* in die\n") as raised:
            group.call(Worker.die, "crash")
        assert str(raised.value.remedy).startswith("what it printed is on ")
    finally:
        group.close()


def test_a_program_whose_worker_dies_shows_that_and_no_more(two_nodes: str) -> None:
    """An uncaught error, as a user sees it: nothing of Ray's own, in either stream."""
    command = [sys.executable, "-m", "tests.unit.runtime.bereaved", two_nodes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    *_, message, remedy = done.stderr.strip().splitlines()
    assert message.startswith("tandem.errors.WorkerError: rank 1 of 2 has died (process ")
    assert remedy.startswith("  -> what it printed is on ")
    assert "raylet)" not in done.stderr
    assert "ray.exceptions" not in done.stderr


def test_an_error_of_one_rank_is_raised_while_its_peer_waits_for_it(two_nodes: str) -> None:
    group = start(two_nodes)
    try:
        pids = [pid for _, pid, _ in group.call_each(Worker.identity)]
        began = time.monotonic()
        with pytest.raises(ValueError, match="no such thing") as raised:
            group.call(Worker.raise_value_error, only=1)
        assert time.monotonic() - began < NOTICED_WITHIN_S
        assert "in raise_value_error" in "".join(traceback.format_exception(raised.value))
        assert all(has_ended(pid, within_s=5) for pid in pids)
    finally:
        group.close()


def test_an_error_of_all_ranks_is_that_error_with_the_workers_traceback(two_nodes: str) -> None:
    group = start(two_nodes)
    try:
        with pytest.raises(ValueError, match=r"^no such thing$") as raised:
            group.call(Worker.raise_value_error)
    finally:
        group.close()
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.index("in raise_value_error") < shown.index("in test_an_error_of_all_ranks")  # the cause on top
    assert "ray.exceptions" not in shown
    assert "rank_process" not in shown
    assert isinstance(raised.value.__cause__, WorkerTraceback)
    assert raised.value.__cause__.everywhere


def test_an_error_that_cannot_leave_its_process_is_told(two_nodes: str) -> None:
    group = start(two_nodes)
    try:
        with pytest.raises(RuntimeError, match=r"UnpicklableError: cannot leave$"):
            group.call(Worker.raise_unpicklable)
    finally:
        group.close()


def test_a_worker_that_calls_for_its_own_end_does_not_end_the_controller(two_nodes: str) -> None:
    group = start(two_nodes)
    try:
        with pytest.raises(RuntimeError, match="SystemExit: 3") as raised:
            group.call(Worker.exit, only=1)
        assert isinstance(raised.value.__cause__, WorkerTraceback)
        assert raised.value.__cause__.rank == 1
        assert not raised.value.__cause__.everywhere
    finally:
        group.close()


def test_workers_that_are_still_open_are_named_when_there_is_no_room_for_others(two_nodes: str) -> None:
    group = start(two_nodes)
    try:
        began = time.monotonic()
        with pytest.raises(ClusterError, match="of the cluster's 2 only 0 are free") as raised:
            start(two_nodes)
        assert str(raised.value.remedy).startswith("close() the workers that this program has open, 2 of them")
        assert time.monotonic() - began < NOTICED_WITHIN_S
        assert group.call(Worker.collectives)[1] == ["rank 0", "rank 1"]
    finally:
        group.close()


@pytest.mark.slow
def test_a_process_that_dies_while_it_starts_is_a_worker_that_died(tmp_path: Path) -> None:
    """The first process that imports what runs in a worker is killed, by a hook in the environment of its cluster."""
    hook = """
import os, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == "tandem.runtime.rank_process" and "default_worker" in " ".join(sys.orig_argv):
            try:
                os.close(os.open(os.environ["MARK"], os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return None
            os.kill(os.getpid(), 9)
sys.meta_path.insert(0, Hook())
"""
    (tmp_path / "sitecustomize.py").write_text(hook)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), os.getcwd()])
    command = [sys.executable, "-m", "tests.unit.runtime.unlucky"]
    environment = {**os.environ, "PYTHONPATH": paths, "MARK": str(tmp_path / "mark")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("a worker's process has died while it started: ")
    assert "class_name" not in first
    assert second == "['rank 0', 'rank 1']"


def test_what_makes_the_worker_may_raise_and_the_room_is_free_again(two_nodes: str) -> None:
    def fail(ranks: Ranks) -> Worker:
        raise ModelError(f"no model on rank {ranks.rank}", remedy="take another one")

    with pytest.raises(ModelError, match="no model on rank 0"):
        start(two_nodes, fail)
    group = start(two_nodes)
    pids = [pid for _, pid, _ in group.call_each(Worker.identity)]
    group.close()
    assert all(has_ended(pid, within_s=5) for pid in pids)
    group.close()
    with pytest.raises(WorkerError, match="have been closed"):
        group.call(Worker.settings)
