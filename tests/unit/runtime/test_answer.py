"""Values and errors that cross from one process to another."""

from __future__ import annotations

import pickle
import threading
import traceback

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from tandem.errors import CheckpointError
from tandem.runtime.answer import Answer, Raised, is_lost_connection


def caught(error: BaseException) -> Raised:
    try:
        raise error
    except BaseException as here:  # noqa: BLE001 - any of them may come
        return pickle.loads(pickle.dumps(Raised.of(here)))


def test_a_value_arrives() -> None:
    answer = pickle.loads(pickle.dumps(Answer.of({"x": torch.ones(2)})))
    assert answer.raised is None
    assert torch.equal(answer.get()["x"], torch.ones(2))


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        FileNotFoundError(2, "No such file or directory", "a.txt"),
        CheckpointError("disk full", remedy="make room"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ],
)
def test_an_error_is_the_same_error(error: BaseException) -> None:
    copy = caught(error).error(1)
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.args == error.args


class TwoArgumentsError(Exception):
    """Its pickled form cannot be made again: `args` has one argument."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} {number}")


def local_error() -> Exception:
    class LocalError(Exception):
        pass

    return LocalError("from a notebook")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TwoArgumentsError("a", 1), "TwoArgumentsError: a 1"),
        (Exception(threading.Lock()), "Exception: <unlocked _thread.lock object"),
    ],
)
def test_an_error_that_pickle_would_change_is_told_in_words(error: Exception, text: str) -> None:
    copy = caught(error).error(1)
    assert type(copy) is RuntimeError
    assert text in str(copy)


def test_an_error_of_a_class_that_only_the_worker_knows() -> None:
    copy = caught(local_error()).error(1)
    assert "from a notebook" in str(copy)
    missing = cloudpickle.dumps(KeyError("x")).replace(b"builtins", b"no_such_").replace(b"KeyError", b"KeyErroR")
    assert str(Raised(missing, "KeyErroR: 'x'", "").error(1)) == "KeyErroR: 'x'"


def test_the_traceback_comes_first() -> None:
    def method() -> None:
        raise ValueError("no")

    try:
        method()
    except ValueError as error:
        raised = Raised.of(error)
    try:
        raise raised.error(1)
    except ValueError as error:
        shown = "".join(traceback.format_exception(error))
    assert "in worker 1\nTraceback (most recent call last):\n" in shown
    assert shown.index("in method") < shown.index("raise raised.error(1)")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_what_would_end_a_process_is_told_to_the_other_in_words(error: BaseException) -> None:
    copy = caught(error).error(1)
    assert type(copy) is RuntimeError
    assert "a worker has called for its own end: " + type(error).__name__ in str(copy)


def test_a_lost_connection_is_told_from_other_errors() -> None:
    assert is_lost_connection(RuntimeError("[pair.cc:534] Connection closed by peer [10.0.0.1]:5000"))
    assert is_lost_connection(RuntimeError("[unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation"))
    assert is_lost_connection(dist.DistBackendError("NCCL error: remote process exited"))
    assert not is_lost_connection(RuntimeError("shapes do not match"))
    assert not is_lost_connection(ConnectionResetError("Connection reset by peer"))  # of the worker's own doing
