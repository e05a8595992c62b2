"""Workers end with their controller, however it ends: a connection is closed by the kernel when a process dies."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress

_CONNECT_TIMEOUT_S = 30.0


class Lifeline:
    """The controller's end. It listens only: connections wait in the kernel's queue, which needs no thread."""

    def __init__(self, host: str, num_workers: int) -> None:
        """Listen on a free port of `host`, for as many workers."""
        self._listener = socket.create_server((host, 0), backlog=num_workers)
        host, port, *_ = self._listener.getsockname()
        self.address: tuple[str, int] = (host, port)

    def close(self, *, timeout_s: float) -> None:
        """End the workers, and wait for it, but not for long. May be called again."""
        deadline = time.monotonic() + timeout_s
        connections: list[socket.socket] = []
        with self._listener, suppress(OSError):  # nobody is left in the queue, or it is closed already
            self._listener.setblocking(False)
            while True:
                connections.append(self._listener.accept()[0])
        for connection in connections:
            with suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_WR)
        for connection in connections:
            with connection, suppress(OSError):  # it never sends: this returns, or raises, at its end
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                connection.recv(1)


def end_with(address: tuple[str, int]) -> None:
    """A worker's end: this process exits as soon as the one that listens at `address` has ended or closed the line.

    A thread waits for it, and needs the interpreter for a moment then. Code that computes or waits in C++ lets it go.

    Raises:
        OSError: Nobody listens there.
    """
    connection = socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        # When a machine loses its power or its network, nobody closes the connection. The kernel then asks after
        # 10 s of silence, three times, with 10 s in between.
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    threading.Thread(target=_exit_at_end, args=(connection,), name="tandem-lifeline", daemon=True).start()


def _exit_at_end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.recv(1)  # nothing is ever sent: it returns, or raises, at the end
    os._exit(1)  # no clean-up that could wait for a peer
