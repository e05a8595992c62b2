"""What controller and worker tell each other, over a socket.

Each message is a frame: 8 bytes of length, then as many bytes. To the worker they are pickles, which only the
controller writes. From the worker they are JSON, because the code in there is the user's and may write anything.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.rewards.sample import Score

MAX_REPLY_BYTES = 64 * 2**20
_LENGTH = struct.Struct(">Q")
LENGTH_BYTES = _LENGTH.size


class ProtocolError(Exception):
    """The worker sent something that is no message: the user's code wrote to our socket."""


@dataclass(frozen=True)
class Setup:
    """The first message to a worker: what to load, and its bounds."""

    function: str | tuple[str, ...] | Mapping[str, str] | bytes  # bytes: a pickled Python function
    weights: Mapping[str, float]
    options: Mapping[str, Any]
    batched: bool
    timeout_s: float
    memory_bytes: int


@dataclass(frozen=True)
class Ready:
    """The function is loaded. `asynchronous`: the worker takes several jobs at a time."""

    asynchronous: bool


@dataclass(frozen=True)
class Failed:
    """The function cannot be loaded."""

    message: str
    remedy: str | None


@dataclass(frozen=True)
class Started:
    """The function is being called for job `number`: its time runs."""

    number: int


@dataclass(frozen=True)
class Finished:
    """The scores of job `number`, one for each of its samples. `retire`: the worker is not fit for another job."""

    number: int
    scores: tuple[Score, ...]
    retire: bool = False


Reply = Ready | Failed | Started | Finished


def frame(payload: bytes) -> bytes:
    """`payload` with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


def frame_length(head: bytes | bytearray) -> int:
    """The number of bytes that follow these `LENGTH_BYTES` bytes."""
    (length,) = _LENGTH.unpack(head)
    return int(length)


def write_job(number: int, samples: Sequence[bytes]) -> bytes:
    """Job `number`, to score these pickled samples, as a frame."""
    return frame(_LENGTH.pack(number) + pickle.dumps(list(samples)))


def read_job(payload: bytes) -> tuple[int, list[bytes]]:
    """The job in a frame: its number and its samples, still pickled."""
    (number,) = _LENGTH.unpack(payload[:LENGTH_BYTES])
    return number, pickle.loads(payload[LENGTH_BYTES:])


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Take the complete frames off the front of `buffer`.

    Raises:
        ProtocolError: A frame claims to be longer than any reply of ours.
    """
    while len(buffer) >= LENGTH_BYTES:
        end = LENGTH_BYTES + frame_length(buffer[:LENGTH_BYTES])
        if end > LENGTH_BYTES + MAX_REPLY_BYTES:
            raise ProtocolError
        if len(buffer) < end:
            return
        payload = bytes(buffer[LENGTH_BYTES:end])
        del buffer[:end]
        yield payload


def write_reply(reply: Reply) -> bytes:
    """`reply` as a frame."""
    match reply:
        case Ready():
            content: dict[str, Any] = {"ready": reply.asynchronous}
        case Failed():
            content = {"failed": reply.message, "remedy": reply.remedy}
        case Started():
            content = {"started": reply.number}
        case Finished():
            scores = [[s.value, s.metrics, s.error] for s in reply.scores]
            content = {"finished": reply.number, "scores": scores, "retire": reply.retire}
    return frame(json.dumps(content, allow_nan=False).encode())


def read_reply(payload: bytes) -> Reply:
    """The reply in a frame, nothing in it taken on trust.

    Raises:
        ProtocolError: It is none of ours.
    """
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError from error
    match content:
        case {"ready": bool(asynchronous)}:
            return Ready(asynchronous)
        case {"failed": str(message), "remedy": None | str() as remedy}:
            return Failed(message, remedy)
        case {"started": int(number)}:
            return Started(number)
        case {"finished": int(number), "scores": list(scores), "retire": bool(retire)}:
            return Finished(number, tuple(_read_score(score) for score in scores), retire)
        case _:
            raise ProtocolError


def _read_score(content: object) -> Score:
    match content:
        case [float(value), dict(metrics), None]:
            if all(isinstance(number, float) and math.isfinite(number) for number in (value, *metrics.values())):
                return Score(value, metrics)
        case [None, dict(), str(error)]:
            return Score(None, error=error)
        case _:
            pass
    raise ProtocolError
