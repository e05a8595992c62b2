"""A worker ends with its controller. Both are real processes; the worker sits in C code, which waits for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

ENDS_WITHIN_S = 10.0
CONTROLLER = """
import signal, sys
from tandem.runtime.watchdog import Lifeline
lifeline = Lifeline("127.0.0.1", 4)
print(lifeline.address[1], flush=True)
sys.stdin.readline()
lifeline.close(timeout_s=0.1)
print("closed", flush=True)
signal.pause()
"""
WORKER = """
import ctypes, sys
from tandem.runtime.watchdog import end_with
end_with(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
ctypes.CDLL(None).pause()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *arguments]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_workers_end_when_the_controller_is_killed(start: Start) -> None:
    controller = start(CONTROLLER)
    port = line(controller)
    workers = [start(WORKER, port) for _ in range(2)]
    assert [line(worker) for worker in workers] == ["ready", "ready"]
    controller.send_signal(signal.SIGKILL)
    assert [worker.wait(ENDS_WITHIN_S) for worker in workers] == [1, 1]


def test_closing_ends_those_that_do_not_end_by_themselves(start: Start) -> None:
    controller = start(CONTROLLER)
    worker = start(WORKER, line(controller))
    assert line(worker) == "ready"
    assert controller.stdin is not None
    controller.stdin.write("\n")
    controller.stdin.flush()
    assert worker.wait(ENDS_WITHIN_S) == 1
    assert line(controller) == "closed"


def test_a_worker_without_a_controller_does_not_begin(start: Start) -> None:
    controller = start(CONTROLLER)
    port = line(controller)
    controller.kill()
    controller.wait()
    worker = start("import sys; sys.stderr = sys.stdout\n" + WORKER, port)
    output, _ = worker.communicate(timeout=ENDS_WITHIN_S)
    assert "ConnectionRefusedError" in output
    assert worker.returncode == 1
