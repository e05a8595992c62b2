"""A worker process as the controller sees it: start it, write to it, read from it, kill it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from tandem.errors import RewardError
from tandem.rewards.messages import Reply, read_reply, take_frames

OUTPUT_BYTES = 4096  # the end of what a worker printed that is kept
_READ_BYTES = 2**16
_MAX_READS = 16  # per event, so that a worker that prints without end cannot keep the others waiting
_EXIT_WAIT_S = 0.5  # between a worker's hanging up and its exit status

# All that a worker gets of the environment: what Python, network libraries and GPU libraries need to work.
# Keys and tokens are not among them: hand them over with reward.options.
KEPT_VARIABLES = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME", "HF_HUB_OFFLINE",
)  # fmt: skip


def worker_environment(variables: Mapping[str, str], search_path: list[str]) -> dict[str, str]:
    """The environment of a worker: a few of `variables`, and the controller's module search path."""
    kept = {name: variables[name] for name in KEPT_VARIABLES if name in variables}
    return kept | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in search_path),
        "PYTHONHASHSEED": "0",  # a function that walks through a set gives the same reward in each worker and run
        "PYTHONIOENCODING": "utf-8:backslashreplace",  # printing a response never raises
    }


class WorkerProcess:
    """A running worker. Nothing here waits for it, except `kill` for its end."""

    def __init__(self, setup: bytes, environment: Mapping[str, str], folder: str) -> None:
        """Start it and send it `setup`, a frame. Raises RewardError if the system has no room for a process."""
        self._connection, remote = socket.socketpair()
        descriptor = remote.fileno()
        command = [sys.executable, "-P", "-u", "-m", "tandem.rewards.worker", str(descriptor), str(os.getpid())]
        with remote:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[descriptor],
                    env=dict(environment),
                    cwd=folder,
                    start_new_session=True,  # Ctrl-C does not reach it, and a kill reaches all that it has started
                )
            except OSError as error:
                self._connection.close()
                raise RewardError(
                    f"a reward worker cannot be started: {error}", remedy="reduce reward.workers"
                ) from error
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self._connection.setblocking(False)
        os.set_blocking(self._stdout.fileno(), False)
        self._unsent = bytearray(setup)
        self._received = bytearray()
        self._output = bytearray()
        self.num_printed = 0  # bytes so far
        self.hung_up = False
        self.stdout_open = True

    @property
    def connection(self) -> socket.socket:
        """The socket, to wait on."""
        return self._connection

    @property
    def stdout(self) -> int:
        """The descriptor of what it prints, to wait on."""
        return self._stdout.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `send_more` has something to do."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a frame, as much of it as goes now."""
        self._unsent += message
        self.send_more()

    def send_more(self) -> None:
        """Send what could not be sent before."""
        try:
            with suppress(BlockingIOError):
                while self._unsent:
                    del self._unsent[: self._connection.send(self._unsent[: 16 * _READ_BYTES])]
        except OSError:  # it has ended, which `receive` finds out
            self._unsent.clear()

    def receive(self) -> list[Reply]:
        """The replies that have arrived; sets `hung_up` at the end. Raises ProtocolError for anything else."""
        try:
            with suppress(BlockingIOError):
                for _ in range(_MAX_READS):
                    part = self._connection.recv(_READ_BYTES)
                    if not part:
                        self.hung_up = True
                        break
                    self._received += part
        except OSError:
            self.hung_up = True
        return [read_reply(payload) for payload in take_frames(self._received)]

    def read_output(self) -> None:
        """Take in what it has printed, and keep the end."""
        for _ in range(_MAX_READS):
            try:
                part = os.read(self._stdout.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            if not part:
                self.stdout_open = False
                return
            self.num_printed += len(part)
            self._output += part
            del self._output[:-OUTPUT_BYTES]

    def output_since(self, mark: int) -> str:
        """The end of what was printed since `num_printed` was `mark`."""
        length = self.num_printed - mark
        kept = self._output[-length:] if length else b""
        text = kept.decode(errors="replace")
        return f"({length - len(kept)} bytes left out) ...{text}" if length > len(kept) else text

    def kill(self) -> str:
        """Kill it and all processes in its session; say how it had ended, if it had ended by itself."""
        try:
            status: int | None = self._process.wait(_EXIT_WAIT_S if self.hung_up else 0)
        except subprocess.TimeoutExpired:
            status = None
        with suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says the latter of the dead
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self.stdout_open:
            self.read_output()
        self._connection.close()
        self._stdout.close()
        return _ending(status)


def _ending(status: int | None) -> str:
    if status is None:
        return "broke off its connection"
    if status < 0:
        return f"was killed by signal {-status} ({signal.strsignal(-status)})"
    return f"ended with exit status {status}"
