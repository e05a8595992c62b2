"""Messages between controller and worker: nothing that a worker sends is taken on trust."""

from __future__ import annotations

import pytest

from tandem.rewards.messages import (
    MAX_REPLY_BYTES,
    Failed,
    Finished,
    ProtocolError,
    Ready,
    Reply,
    Started,
    frame,
    read_job,
    read_reply,
    take_frames,
    write_job,
    write_reply,
)
from tandem.rewards.sample import Score

REPLIES: list[Reply] = [
    Ready(True),
    Failed("no such file", "look again"),
    Failed("no such file", None),
    Started(3),
    Finished(3, (Score(0.5, {"reward/a": 1.0}), Score(None, error="why")), retire=True),
]


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_arrives_as_it_was_written(reply: Reply) -> None:
    (payload,) = take_frames(bytearray(write_reply(reply)))
    assert read_reply(payload) == reply


def test_frames_arrive_in_pieces() -> None:
    stream = frame(b"one") + frame(b"") + frame(b"three")
    buffer, taken = bytearray(), []
    for byte in stream:
        buffer.append(byte)
        taken += take_frames(buffer)
    assert taken == [b"one", b"", b"three"]
    assert not buffer


def test_a_job_arrives_as_it_was_written() -> None:
    (payload,) = take_frames(bytearray(write_job(7, [b"a", b"b"])))
    assert read_job(payload) == (7, [b"a", b"b"])


def test_a_frame_that_claims_to_be_huge() -> None:
    with pytest.raises(ProtocolError):
        list(take_frames(bytearray((MAX_REPLY_BYTES + 1).to_bytes(8, "big"))))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80\x04.",
        b"[" * 100_000,
        b"{}",
        b'{"started": "3"}',
        b'{"finished": 3, "scores": [[1, {}, null]], "retire": false}',
        b'{"finished": 3, "scores": [[NaN, {}, null]], "retire": false}',
        b'{"finished": 3, "scores": [[1.0, {"a": "b"}, null]], "retire": false}',
        b'{"finished": 3, "scores": [[null, {}, null]], "retire": false}',
        b'{"finished": 3, "scores": [[1.0, {}, "both"]], "retire": false}',
        b'{"finished": 3, "scores": 5, "retire": false}',
    ],
)
def test_nonsense_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_reply(payload)
