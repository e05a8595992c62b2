"""What is said of a cluster that cannot be used, before anything is started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch

from tandem.errors import ClusterError
from tandem.runtime import cluster
from tandem.runtime.cluster import check_cluster, connected


def problem_of(num_workers: int, device_type: str, address: str | None) -> ClusterError:
    with pytest.raises(ClusterError) as raised:
        check_cluster(num_workers, device_type, address)
    assert not ray.is_initialized()
    assert raised.value.remedy is not None
    return raised.value


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # Python's own way to say that there is no such module
    with pytest.raises(ClusterError, match="needs Ray") as raised:
        check_cluster(2, "cpu", None)
    assert "pip install ray" in str(raised.value.remedy)


@pytest.mark.parametrize("address", ["10.0.0.1", "head:port", "ray://10.0.0.1:10001", ""])
def test_an_address_that_is_none(address: str) -> None:
    assert "is neither host:port nor auto" in problem_of(2, "cpu", address).message


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379", "127.0.0.1:99999"])
def test_an_address_where_nobody_listens_is_found_out_at_once(address: str) -> None:
    began = time.monotonic()
    error = problem_of(2, "cpu", address)
    assert error.message.startswith(f"the Ray cluster at {address} cannot be joined: ")
    assert "ray start --head" in str(error.remedy)
    assert time.monotonic() - began < 30  # Ray itself tries without an end


def test_a_port_that_is_not_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_PROBE_TIMEOUT_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        error = problem_of(2, "cpu", f"127.0.0.1:{server.getsockname()[1]}")
    assert "nothing there answers as Ray does" in error.message


def test_more_workers_than_the_cluster_has_slots(two_nodes: str) -> None:
    check_cluster(2, "cpu", two_nodes)
    error = problem_of(3, "cpu", two_nodes)
    assert "cluster.num_workers=3 needs as many CPU slots, but" in error.message
    assert error.message.endswith("has 2")
    assert "at most 2" in str(error.remedy)


def test_gpus_that_are_not_there(two_nodes: str) -> None:
    assert problem_of(2, "cuda", two_nodes).message.endswith("has 0")
    too_many = torch.cuda.device_count() + 1
    assert problem_of(too_many, "cuda", None).message.endswith(f"this machine has {too_many - 1}")


def test_some_cpu_workers_fit_on_any_machine_but_not_any_number() -> None:
    check_cluster(8, "cpu", None)
    error = problem_of(1_000_000, "cpu", None)
    assert error.message.startswith("cluster.num_workers=1000000 is too many for this machine, which has ")
    assert str(error.remedy).startswith("set cluster.num_workers to at most ")
    with pytest.raises(ClusterError, match="too many"), connected(1_000_000, "cpu", None):
        pass


@pytest.mark.parametrize("name", ["x" * 100, "no_folder"])
def test_a_temporary_folder_that_ray_cannot_use(name: str, tmp_path: Path) -> None:
    """In a process of its own: Ray's library keeps from the attempt how this cluster would have asked for tokens."""
    (tmp_path / "no_folder").touch()
    environment = {key: value for key, value in os.environ.items() if key != "RAY_TMPDIR"}
    done = subprocess.run(
        [sys.executable, "-c", "from tandem.runtime.cluster import connected\nwith connected(2, 'cpu', None): pass"],
        env={**environment, "TMPDIR": str(tmp_path / name)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "ClusterError: Ray cannot be started on this machine: " in done.stderr
    assert done.stderr.splitlines()[-1].startswith("  -> set RAY_TMPDIR=/tmp")


def test_a_cluster_of_another_version(two_nodes: str) -> None:
    code = (
        "import sys, ray; ray.__version__ = '2.0.0'\n"
        "from tandem.runtime.cluster import connected\n"
        "with connected(2, 'cpu', sys.argv[1]): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, two_nodes], capture_output=True, text=True, timeout=100, check=False
    )
    assert "ClusterError: the Ray cluster at" in done.stderr
    assert f"Ray: {ray.__version__}" in done.stderr
    assert "-> install the same versions of Ray and Python on every machine" in done.stderr


def test_a_program_that_has_called_ray_init_keeps_its_connection_and_its_signals(two_nodes: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ray.init(address=two_nodes, log_to_driver=False, logging_level="ERROR")
    own = signal.signal(signal.SIGTERM, before)
    try:
        with connected(2, "cpu", None), connected(2, "cpu", "auto"), connected(2, "cpu", two_nodes):
            pass
        assert ray.is_initialized()
        with pytest.raises(ClusterError, match=f"is connected to {two_nodes}"):
            check_cluster(2, "cpu", "10.0.0.1:6379")
        with pytest.raises(ClusterError, match="has 2"), connected(3, "cpu", None):
            pass
        assert ray.is_initialized()
    finally:
        ray.shutdown()
    assert own is not before  # Ray does replace it


def test_the_programs_handlers_stay_in_force_when_we_connect(two_nodes: str) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    with connected(2, "cpu", two_nodes):
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before
    assert not ray.is_initialized()
