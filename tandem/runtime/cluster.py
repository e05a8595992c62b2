"""The Ray cluster that workers run on: looked at before a run, joined or started for its length."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

import torch

from tandem.errors import ClusterError

_CONNECT_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 30.0
_PROBE = Path(__file__).with_name("cluster_probe.py")
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 would leave them what others of this machine do not want
    "RAY_AUTH_MODE": None,
    "PYTHONBREAKPOINT": None,
}
# Lines of Ray that it does not print: what has died is told by us.
_UNPRINTED = "A worker died or was killed|Raylet is terminated|The node with node id"
HELD: Counter[str] = Counter()  # CPU slots and GPUs of the groups of workers that this program has open
_CPU_WORKERS = 8  # on any machine, to try things out
_CPU_WORKERS_PER_CPU = 4
_NEW_CLUSTER = "start one with `ray start --head`, or set cluster.address=null for one that lives as long as the run"


def check_cluster(num_workers: int, device_type: str, address: str | None) -> None:
    """Find out that there will be a device for each worker. Nothing is left running.

    Args:
        num_workers: Ranks.
        device_type: "cuda" = each has a GPU; "cpu" = each has a CPU slot of an existing cluster.
        address: "host:port" or "auto": the cluster to join. None = one will be started on this machine.

    Raises:
        ClusterError: Ray is missing or another version, the cluster does not answer, it has too few devices.
    """
    ray = _ray()
    if ray.is_initialized():
        _check_same(ray, address)
        _check_room(num_workers, device_type, ray.cluster_resources(), "the Ray cluster")
    elif address is not None:
        _check_room(num_workers, device_type, _probe(address), f"the Ray cluster at {address}")
    else:
        _check_machine(num_workers, device_type)


@contextmanager
def connected(num_workers: int, device_type: str, address: str | None) -> Generator[bool]:
    """Be connected to a Ray cluster: the one that the program is connected to already, `address`, or a new one here.

    At the end the first is left as it is, the second is left, the third is shut down.

    Yields:
        Whether it is a new one.

    Raises:
        ClusterError: There is no Ray, the cluster does not answer, or has too few devices.
    """
    ray = _ray()
    if ray.is_initialized():
        check_cluster(num_workers, device_type, address)
        yield False
        return
    new_cluster: dict[str, int | None] = {}
    if address is None:
        _check_machine(num_workers, device_type)
        new_cluster = {"num_cpus": num_workers, "num_gpus": torch.cuda.device_count() if device_type == "cuda" else 0}
    else:
        _check_answers(address)
    with _own_signals(), _environment(_VARIABLES):
        try:
            ray.init(
                address=address or "local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **new_cluster,
            )
        except Exception as error:
            ray.shutdown()  # what has been started already
            # Where one of its processes is not up in time, Ray raises nothing more special than Exception.
            if type(error) is not Exception and not isinstance(error, (OSError, RuntimeError, ValueError)):
                raise
            if address is None:
                raise _start_error(error) from error
            raise _join_error(address, str(error)) from error
    try:
        _check_room(num_workers, device_type, ray.cluster_resources(), "the Ray cluster")
        yield address is None
    finally:
        ray.shutdown()


def _ray() -> ModuleType:
    try:
        with _environment({"RAY_DEDUP_LOGS_SKIP_REGEX": _UNPRINTED}):  # read when Ray is imported
            import ray
    except ImportError as error:
        raise ClusterError(
            "cluster.num_workers > 1 needs Ray, which is not installed",
            remedy="pip install ray, or set cluster.num_workers=1",
        ) from error
    return ray


def _check_same(ray: ModuleType, address: str | None) -> None:
    """The program has called `ray.init` itself: that must be good enough."""
    if ray.util.client.ray.is_connected():
        raise ClusterError(
            "this program is connected to Ray by a ray:// address, which workers cannot reach it by",
            remedy="run it on a machine of the cluster, with ray.init(address='auto')",
        )
    own = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", own):
        raise ClusterError(
            f"cluster.address={address}, but this program has called ray.init and is connected to {own}",
            remedy="call ray.shutdown() first, or leave cluster.address out",
        )


def _check_room(num_workers: int, device_type: str, resources: Mapping[str, float], where: str) -> None:
    name, noun = ("GPU", "GPUs") if device_type == "cuda" else ("CPU", "CPU slots")
    there_are = int(resources.get(name, 0))
    if there_are >= num_workers:
        return
    if HELD[name]:
        remedy = f"close() the workers that this program has open, {HELD[name]} of them: its next ones start anew"
    elif there_are:
        remedy = f"set cluster.num_workers to at most {there_are}, or add machines with `ray start --address`"
    else:
        remedy = "set cluster.device=cpu, or join a cluster that has GPUs with cluster.address"
    raise ClusterError(
        f"cluster.num_workers={num_workers} needs as many {noun}, but {where} has {there_are}", remedy=remedy
    )


def _check_machine(num_workers: int, device_type: str) -> None:
    """There is room on this one for a cluster of our own."""
    if device_type == "cuda":
        _check_room(num_workers, device_type, {"GPU": torch.cuda.device_count()}, "this machine")
        return
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    most = max(_CPU_WORKERS, _CPU_WORKERS_PER_CPU * cpus)
    if num_workers > most:
        raise ClusterError(
            f"cluster.num_workers={num_workers} is too many for this machine, which has {cpus} CPUs",
            remedy=f"set cluster.num_workers to at most {most}, or join a cluster of several machines with "
            "cluster.address",
        )


def _check_answers(address: str) -> None:
    """Ray itself would try for minutes, without an end."""
    if address == "auto":
        return
    host, separator, port = address.rpartition(":")
    if "://" in address or not separator or not port.isdecimal():
        raise ClusterError(
            f"cluster.address={address} is neither host:port nor auto"
            + (": ray:// is for clients outside of a cluster" if address.startswith("ray://") else ""),
            remedy="give what `ray start --head` printed, such as 10.0.0.1:6379, on a machine of the cluster",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise _join_error(address, str(error)) from error


def _probe(address: str) -> Mapping[str, float]:
    """Join in a process of its own, which can be killed, and return the cluster's resources."""
    _check_answers(address)
    command = [sys.executable, "-P", str(_PROBE), address]  # -P: our folder has a module `ray`, too
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        # What a killed process has written is bytes even where text was asked for.
        if isinstance(error.stderr, bytes) and b"InvalidAuthToken" in error.stderr:
            raise ClusterError(
                f"the Ray cluster at {address} asks for a token",
                remedy="set RAY_AUTH_MODE=token here, and RAY_AUTH_TOKEN where ~/.ray/auth_token is not the cluster's",
            ) from error
        problem = f"nothing there answers as Ray does within {_PROBE_TIMEOUT_S:g} s"
        raise _join_error(address, problem) from error
    found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-2000:]}
    if "error" in found:
        raise _join_error(address, found["error"])
    return found["resources"]


def _start_error(error: Exception) -> ClusterError:
    """Of the system it is where Ray's folder cannot be made, or has too long a name for the sockets in it."""
    remedy = "set RAY_TMPDIR=/tmp, or another folder with a short name" if isinstance(error, OSError) else None
    return ClusterError(f"Ray cannot be started on this machine: {error}", remedy=remedy)


def _join_error(address: str, problem: str) -> ClusterError:
    if "Version mismatch" in problem:
        return ClusterError(
            f"the Ray cluster at {address} has other versions: {problem.strip()}",
            remedy="install the same versions of Ray and Python on every machine",
        )
    return ClusterError(f"the Ray cluster at {address} cannot be joined: {problem.strip()}", remedy=_NEW_CLUSTER)


@contextmanager
def _environment(variables: Mapping[str, str | None]) -> Generator[None]:
    """Set those that the user has not set, for Ray to read; afterwards all of them are as they were.

    None = not to be set, but Ray does it.
    """
    before = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        if value is not None:
            os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_signals() -> Generator[None]:
    """Keep the program's own handlers, which `ray.init` replaces.

    What it starts ignores a closed terminal, and SIGTERM, which often goes to all processes of a job: whether that
    ends the program is for the program to say. Ray's processes have a handler of their own for SIGTERM, so it is
    blocked, which they inherit, as Ray itself does with SIGINT.
    """
    with ExitStack() as restore:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        restore.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            restore.callback(signal.signal, number, signal.getsignal(number))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        yield
