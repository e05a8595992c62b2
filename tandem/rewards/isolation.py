"""What a worker does to itself before it runs the user's code: bounds, and less power.

A reward function runs on what a model wrote, and some functions execute it. So the process in which it runs has a
limit on memory, writes no core dump, dies with the controller, and, where the controller is root, is not root.
These bounds contain accidents. They are no sandbox against code that tries to break out.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterable

NOBODY = 65534  # the uid and gid that Linux reserves for a user who owns nothing
_PR_SET_PDEATHSIG = 1


def limit_memory(max_bytes: int) -> None:
    """Let allocations beyond `max_bytes` of private memory fail, and write no core dump.

    RLIMIT_DATA rather than RLIMIT_AS, which also counts addresses that a library only reserves. A lower limit that
    the process came with stays.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    max_bytes = min(max_bytes, sys.maxsize if hard == resource.RLIM_INFINITY else hard)
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the controller's thread that started it ends, however it ends.

    Where the kernel is not Linux, a worker ends when its call has returned and it finds the socket closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def drop_root(needed: Iterable[str]) -> bool:
    """Become the user nobody, if this process is root and nobody may read all of `needed`; say if it did.

    To be called when the user's file is loaded: what it reads at import, it reads as root. In a home folder of root
    (an environment in /root, say) nobody could not import a module later, in a call; then the worker remains root.
    Either way the kernel forgets what `die_with_parent` asked for.
    """
    if os.geteuid() != 0 or sys.platform != "linux":
        return False
    paths = [path for path in needed if os.path.exists(path)]
    try:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        readable = all(os.access(path, _wanted(path), effective_ids=True) for path in paths)
        os.seteuid(0)
        os.setegid(0)
        if readable:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:  # a container whose root may not change users, or without this user
        os.seteuid(0)
        os.setegid(0)
        return False
    return readable


def _wanted(path: str) -> int:
    return os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
