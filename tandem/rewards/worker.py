"""A worker process: loads the reward function, then scores what the controller sends, until that hangs up.

Started by `process.py` as `python -m tandem.rewards.worker SOCKET PARENT`. It imports neither torch nor pydantic.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from tandem.errors import RewardError
from tandem.rewards.function import FunctionChoice, RewardFunction, load_reward
from tandem.rewards.isolation import die_with_parent, drop_root, limit_memory
from tandem.rewards.messages import (
    LENGTH_BYTES,
    Failed,
    Finished,
    Ready,
    Reply,
    Setup,
    Started,
    frame_length,
    read_job,
    write_reply,
)
from tandem.rewards.outcome import invalid, timed_out
from tandem.rewards.raised import Raised
from tandem.rewards.sample import Sample, Score


def main(arguments: Sequence[str]) -> None:
    """Serve on the socket with the descriptor `arguments[0]`, for the process `arguments[1]`."""
    connection, parent = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    connection.set_inheritable(False)
    die_with_parent(parent)
    message = _receive(connection)
    if message is not None:
        setup: Setup = pickle.loads(message)
        limit_memory(setup.memory_bytes)
        reward = _load(setup)
        if isinstance(reward, Failed):
            connection.sendall(write_reply(reward))
        else:
            drop_root([*sys.path, *_files(setup.function), *_named_files(setup.options)])
            die_with_parent(parent)  # again: the kernel forgets it at a change of user
            connection.sendall(write_reply(Ready(reward.asynchronous)))
            if reward.asynchronous:
                asyncio.run(_serve_many(connection, reward, setup.timeout_s))
            else:
                _serve(connection, reward)
    os._exit(0)  # whatever threads the user's code has left


def _load(setup: Setup) -> RewardFunction | Failed:
    with Raised() as raised:
        given = setup.function
        choice: FunctionChoice = pickle.loads(given) if isinstance(given, bytes) else given
        try:
            return load_reward(choice, weights=setup.weights, options=setup.options, batched=setup.batched)
        except RewardError as error:
            return Failed(error.message, error.remedy)
    return Failed(
        f"the reward function cannot be rebuilt in a worker process: {raised.text}",
        "it must not need objects that live in this process only; or put it in a file: reward.function=file.py:name",
    )


def _files(function: str | tuple[str, ...] | Mapping[str, str] | bytes) -> list[str]:
    """The user's files and their folders."""
    match function:
        case bytes():
            texts: Iterable[str] = ()
        case str():
            texts = (function,)
        case Mapping():
            texts = function.values()
        case _:
            texts = function
    files = [Path(text.rpartition(":")[0]).expanduser().resolve() for text in texts if ":" in text]
    return [str(path) for file in files for path in (file.parent, file)]


def _named_files(options: Mapping[str, Any]) -> list[str]:
    """Options that may be names of files, such as one with a key."""
    return [option for option in options.values() if isinstance(option, str)]


def _serve(connection: socket.socket, reward: RewardFunction) -> None:
    """One job after the other, in the main thread, where signals such as SIGALRM arrive."""
    while (payload := _receive(connection)) is not None:
        number, samples = read_job(payload)
        connection.sendall(write_reply(Started(number)))
        connection.sendall(write_reply(_run_to_end(_score(reward, number, samples, timeout_s=None))))


async def _serve_many(connection: socket.socket, reward: RewardFunction, timeout_s: float) -> None:
    """Jobs side by side in one event loop, each with its own time limit."""
    reader, writer = await asyncio.open_connection(sock=connection)

    def send(reply: Reply) -> None:
        writer.write(write_reply(reply))

    async def run(number: int, samples: list[bytes]) -> None:
        send(Started(number))
        send(await _score(reward, number, samples, timeout_s))

    async with asyncio.TaskGroup() as group:
        while True:
            try:
                length = frame_length(await reader.readexactly(LENGTH_BYTES))
                group.create_task(run(*read_job(await reader.readexactly(length))))
            except asyncio.IncompleteReadError:
                os._exit(0)


async def _score(reward: RewardFunction, number: int, pickled: Sequence[bytes], timeout_s: float | None) -> Finished:
    retire = False
    try:
        async with _time_limit(timeout_s):
            scores = await _evaluate(reward, pickled)
    except TimeoutError:
        scores = [timed_out(timeout_s or 0.0)] * len(pickled)
    except asyncio.CancelledError:  # not our time limit: the user's code cancelled what it was waiting for
        scores = [invalid("the reward function was cancelled from within")] * len(pickled)
    except MemoryError:
        scores = [invalid("out of memory: the function needs more than reward.memory_gib")] * len(pickled)
        retire = True
    return Finished(number, tuple(scores), retire)


def _time_limit(timeout_s: float | None) -> AbstractAsyncContextManager[object]:
    """The limit for an asynchronous function; None for one that only the controller can stop, by killing it."""
    return nullcontext() if timeout_s is None else asyncio.timeout(timeout_s)


async def _evaluate(reward: RewardFunction, pickled: Sequence[bytes]) -> list[Score]:
    problems: list[Score | None] = []
    samples: list[Sample] = []
    for content in pickled:
        with Raised() as raised:
            samples.append(pickle.loads(content))
        unread = f"the sample cannot be read in a worker process: {raised.text}"
        problems.append(None if raised.text is None else invalid(unread))
    evaluated = iter(await reward.evaluate(samples))
    return [problem or next(evaluated) for problem in problems]


def _run_to_end(coroutine: Coroutine[Any, Any, Finished]) -> Finished:
    """The result of a coroutine that never waits. No event loop runs, so the function may run one of its own."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a synchronous reward function cannot wait")


def _receive(connection: socket.socket) -> bytes | None:
    """The next frame's content, or None when the controller has hung up."""
    head = _receive_exactly(connection, LENGTH_BYTES)
    return None if head is None else _receive_exactly(connection, frame_length(head))


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), 2**20))
        if not part:
            return None
        content += part
    return bytes(content)


if __name__ == "__main__":
    main(sys.argv[1:])
