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
from tandem.runtime.answer import Answer, Catcher, Raised, is_lost_connection


def caught(error: BaseException) -> Raised:
    with Catcher() as catcher:
        raise error
    assert catcher.raised is not None
    return pickle.loads(pickle.dumps(catcher.raised))


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
        KeyboardInterrupt(),
        SystemExit(3),
    ],
)
def test_an_error_is_the_same_error(error: BaseException) -> None:
    copy = caught(error).error()
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
    copy = caught(error).error()
    assert type(copy) is RuntimeError
    assert text in str(copy)


def test_an_error_of_a_class_that_only_the_worker_knows() -> None:
    copy = caught(local_error()).error()
    assert "from a notebook" in str(copy)
    missing = cloudpickle.dumps(KeyError("x")).replace(b"builtins", b"no_such_").replace(b"KeyError", b"KeyErroR")
    assert str(Raised(missing, "KeyErroR: 'x'", "").error()) == "KeyErroR: 'x'"


def test_the_traceback_comes_first_and_begins_in_the_method() -> None:
    def method() -> None:
        raise ValueError("no")

    with Catcher() as catcher:
        method()
    assert catcher.raised is not None
    try:
        raise catcher.raised.error()
    except ValueError as error:
        shown = "".join(traceback.format_exception(error))
    assert "in a worker\nTraceback (most recent call last):\n" in shown
    assert shown.index("in method") < shown.index("in test_the_traceback")
    assert "with Catcher()" not in catcher.raised.trace


def test_a_lost_connection_is_told_from_other_errors() -> None:
    assert is_lost_connection(RuntimeError("[pair.cc:534] Connection closed by peer [10.0.0.1]:5000"))
    assert is_lost_connection(dist.DistBackendError("NCCL error: remote process exited"))
    assert not is_lost_connection(RuntimeError("shapes do not match"))
    assert not is_lost_connection(ConnectionResetError("Connection reset by peer"))  # of the worker's own doing
