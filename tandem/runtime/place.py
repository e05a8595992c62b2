"""Where a worker's process is, and what its machine tells of its end."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

# What `faulthandler`, which Ray enables, writes when a process crashes: the reason, and Python's stack.
_CRASH = re.compile(r"^Fatal Python error: (.*?)(?=^Extension modules:|\Z)", re.DOTALL | re.MULTILINE)
# What Ray knows: a kind, and a sentence. SYSTEM_ERROR stands for anything of which it knows nothing.
_LOST_NODE = re.compile("node has (died|crashed)")
_EXIT = re.compile(r"Worker exit type: (\w+) Worker exit detail: (.*)", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """Where a worker's process is."""

    node: str  # of Ray: several may be on one machine
    host: str  # IP address
    host_name: str
    pid: int
    log: str  # the file on that machine that has its standard error
    out_of_memory_kills: int  # on that machine, until it started

    @classmethod
    def here(cls) -> Place:
        """That of this process, a worker of Ray."""
        return cls(
            node=ray.get_runtime_context().get_node_id(),
            host=ray.util.get_node_ip_address(),
            host_name=socket.gethostname(),
            pid=os.getpid(),
            log=os.path.realpath("/proc/self/fd/2"),
            out_of_memory_kills=_out_of_memory_kills(),
        )

    def reason_of_death(self, known: str) -> str:
        """Why the process has ended: what Ray knows, or what this machine tells if it was here."""
        if _LOST_NODE.search(known):
            return f"Ray's own process on {self.host_name} has ended, or the machine is lost"
        told = _EXIT.search(known)
        if told is None or told[1] != "SYSTEM_ERROR" or self.host_name != socket.gethostname():
            return known_reason(known)
        log = Path(self.log)
        crash = _CRASH.search(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else None
        if crash is not None:
            return f"it has crashed: {crash[1].strip()}"
        if _out_of_memory_kills() > self.out_of_memory_kills:
            return "the kernel has killed processes on this machine for lack of memory"
        return "it was killed (SIGKILL), or ended itself at once"


def known_reason(known: str) -> str:
    """What Ray says of a death, without its names for things that users do not know."""
    told = _EXIT.search(known)
    if told is not None:
        return "it was killed or has crashed" if told[1] == "SYSTEM_ERROR" else f"{told[1]}: {told[2]}".strip()
    lines = [line for line in known.splitlines() if not line.startswith("\t")]
    return " ".join(line.strip() for line in lines[1:] or lines)


def node_by_node(places: Sequence[Place]) -> list[int]:
    """An order of `places` that keeps those of one node together; nodes in the order of their first place."""
    nodes = list(dict.fromkeys(place.node for place in places))
    return sorted(range(len(places)), key=lambda index: nodes.index(places[index].node))


def _out_of_memory_kills() -> int:
    """How many processes this machine's kernel has killed for lack of memory; 0 where it does not tell."""
    counters = Path("/proc/vmstat")
    found = re.search(r"^oom_kill (\d+)$", counters.read_text(), re.MULTILINE) if counters.is_file() else None
    return int(found[1]) if found else 0
