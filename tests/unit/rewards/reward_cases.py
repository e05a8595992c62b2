"""Reward functions, well-behaved and not, that the tests load as a user's file."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def tell(response: str) -> dict[str, float]:
    """What this worker process is like."""
    heavy = [name for name in ("torch", "pydantic", "numpy", "transformers") if name in sys.modules]
    return {"score": float(response), "heavy": len(heavy), "uid": os.geteuid(), "pid": os.getpid()}


def environment(response: str) -> dict[str, float]:
    return {"score": 1.0, "secret": "SECRET_TOKEN" in os.environ, "path": "PATH" in os.environ}


def misbehave(response: str, ground_truth: Any) -> Any:
    """Do what the response says; 1 if it says nothing special."""
    print(f"asked to {response}")
    match response:
        case "loop":
            while True:
                pass
        case "hang in C":
            if ground_truth is not None:
                open(ground_truth, "w").close()  # a pipe: its reader learns that we are here
            libc = ctypes.PyDLL(None)  # keeps the interpreter lock: no Python code of this process runs any more
            libc.pause()
        case "exit":
            os._exit(7)
        case "crash":
            ctypes.string_at(0)
        case "eat memory":
            eaten = []
            while True:
                eaten.append(bytearray(2**24))
        case "print without end":
            while True:
                print("and on " * 1000)
        case "raise":
            raise KeyError("no such thing")
        case "raise with full hands":
            in_hand = bytearray(40 * 2**20)
            raise ValueError(f"{len(in_hand)} bytes")
        case "leave":
            sys.exit(3)
        case "read":
            return float(len(sys.stdin.read()))
        case "close everything":
            os.closerange(3, 256)
            time.sleep(60)
        case "write to us":
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b"\xff" * 64)
                except OSError:
                    continue
            time.sleep(60)
        case "start a child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            print(f"child {child.pid}", flush=True)
            while True:
                pass
        case "tell the pid":
            return {"score": 1.0, "pid": os.getpid()}
        case "start a thread":
            threading.Thread(target=time.sleep, args=(60,)).start()
            return 1.0
    return 1.0


def returns(response: str, ground_truth: Any) -> Any:
    return ground_truth


def same(response: str, ground_truth: Any, extra_info: Any) -> dict[str, float]:
    """1 if type and text of both are what the response says."""
    return {"score": float(response == f"{type(ground_truth).__name__} {ground_truth!r} {extra_info!r}")}


async def asynchronous(response: str) -> float:
    match response:
        case "wait for ever":
            await asyncio.Event().wait()
        case "block":
            while True:
                pass
        case "exit":
            os._exit(7)
        case "raise":
            raise ValueError("not today")
        case "cling":
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    continue
        case "time out by itself":
            raise TimeoutError("the judge is slow")
        case "cancel":
            raise asyncio.CancelledError
        case "eat memory":
            raise MemoryError
    await asyncio.sleep(0)
    return float(response)


def pair(response: str, extra_info: str) -> float:
    """Ends only when two calls, in two processes, are under way."""
    (Path(extra_info) / response).touch()
    while len(os.listdir(extra_info)) < 2:
        time.sleep(0.001)
    return 1.0


_IN_FLIGHT = 0
_ALL_HERE = asyncio.Event()


async def meet(response: str, ground_truth: int) -> dict[str, float]:
    """Ends only when `ground_truth` calls are in flight at once."""
    global _IN_FLIGHT
    _IN_FLIGHT += 1
    if ground_truth == _IN_FLIGHT:
        _ALL_HERE.set()
    await _ALL_HERE.wait()
    return {"score": 1.0}


_CROWD = 0


async def crowd(response: str) -> dict[str, float]:
    """How many calls are in flight in this process."""
    global _CROWD
    _CROWD += 1
    seen = _CROWD
    for _ in range(20):
        await asyncio.sleep(0)
        seen = max(seen, _CROWD)
    _CROWD -= 1
    return {"score": 1.0, "crowd": seen}


def batch(responses: list[str], ground_truths: list[Any]) -> Any:
    if "raise" in responses:
        raise ValueError("a bad batch")
    if "one number" in responses:
        return 1.0
    if "too few" in responses:
        return [1.0] * (len(responses) - 1)
    return [{"score": float(r == t), "size": len(responses)} for r, t in zip(responses, ground_truths, strict=True)]


def call_home(responses: list[str], extra_infos: list[int]) -> list[float]:
    """Connect to the port that `extra_info` names, and say how many responses came."""
    socket.create_connection(("127.0.0.1", extra_infos[0])).close()
    return [float(len(responses))] * len(responses)


class Counter:
    """Counts its calls from `start` on; takes `gib` of memory before the first one."""

    def __init__(self, start: int = 0, gib: int = 0) -> None:
        self.count = start
        self.memory = bytearray(gib << 30)

    def __call__(self, response: str) -> float:
        self.count += 1
        return self.count
