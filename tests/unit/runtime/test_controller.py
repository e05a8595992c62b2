"""Signals to a controller with a cluster of its own, and its sudden death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.errors import ClusterError
from tandem.runtime import cluster
from tandem.runtime.cluster import check_cluster
from tests.unit.runtime.worker import has_ended

WORKERS_END_WITHIN_S = 10.0
ENDS_WITHIN_S = 45.0  # Ray's library ends its process with an error after 60 s without that one
RAY_ENDS_WITHIN_S = 120.0  # two of its processes wait for 60 s before they give up


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture(params=[()])
def controller(pipe: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """In a session of its own, so that what is sent to its process group reaches nobody else."""
    command = [sys.executable, "-m", "tests.unit.runtime.controller", str(pipe), *request.param]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    process.kill()
    process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def descendants(pid: int) -> set[int]:
    """All processes that it and its children have started, as /proc tells."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_controller_is_interrupted_and_then_killed(
    controller: subprocess.Popen[str], pipe: Path, must_end: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert line(controller) == "environment as before: True"
    address = line(controller)
    assert line(controller) == "nice as here: True"
    workers = [int(pid) for pid in line(controller).split()]
    assert len(workers) == 2
    monkeypatch.setattr(cluster, "_PROBE_TIMEOUT_S", 8.0)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ClusterError, match=f"{address} asks for a token"):  # nobody else joins a program's own cluster
        check_cluster(2, "cpu", address)

    with pipe.open("wb"):  # opens when rank 0 has come to read it: the call is under way
        os.killpg(controller.pid, signal.SIGHUP)  # a closed terminal: to Ray's processes, too
        assert line(controller) == "SIGHUP"
        for process in descendants(controller.pid) | {controller.pid}:  # as systemd and Slurm do
            os.kill(process, signal.SIGTERM)
        assert line(controller) == "SIGTERM"
        os.killpg(controller.pid, signal.SIGINT)  # Ctrl-C: likewise
        assert line(controller) == "interrupted"
    assert line(controller) == "['rank 0', 'rank 1']"  # the workers have ended the call and go on with the next

    assert pipe.read_bytes() == b""  # they hang
    of_ray = [os.pidfd_open(pid) for pid in descendants(controller.pid) - set(workers)]
    assert of_ray
    controller.kill()
    must_end.update(dict.fromkeys(of_ray, time.monotonic() + RAY_ENDS_WITHIN_S))
    assert all(has_ended(pid, WORKERS_END_WITHIN_S) for pid in workers)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("controller", [("close",)], indirect=True)
def test_a_controller_ends_well_though_rays_own_processes_have_died(
    controller: subprocess.Popen[str], pipe: Path
) -> None:
    """Its work is done and saved: what Ray has to say of its end is of no interest."""
    for _ in range(4):
        line(controller)
    pipe.write_bytes(b"")
    assert line(controller) == "['rank 0', 'rank 1']"
    of_ray = [pid for pid in descendants(controller.pid) if name_of(pid) == "gcs_server"]
    assert len(of_ray) == 1
    os.kill(of_ray[0], signal.SIGKILL)
    assert controller.stdin is not None
    controller.stdin.write("\n")
    controller.stdin.flush()
    assert controller.wait(ENDS_WITHIN_S) == 0


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
