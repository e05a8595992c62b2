"""A file of JSON lines, one object a step, that can be cut back to an earlier step."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointError

_DEEPEST = 100  # levels of a value that are written; one that holds itself has no end
_MOST_BITS = 10_000  # of an integer: Python shows 4300 digits at most


class Journal:
    """Appends one object a step to a file, all of it or nothing. No line is kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line, in the hands of the system before this returns: a killed process loses none.

        Raises:
            CheckpointError: It cannot be written, such as when the disk is full; the lines before it are untouched.
        """
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                _write_whole(file, as_json(row).encode() + b"\n")
            finally:
                os.close(file)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def cut_back(self, step: int) -> None:
        """Drop the lines after `step`, and what a killed process left of a line.

        Raises:
            CheckpointError: The file cannot be read or cut.
        """
        if not self.path.exists():
            return
        try:
            with self.path.open("r+b") as file:
                end = 0
                for line in file:
                    if not _is_up_to(line, step):
                        break
                    end += len(line)
                file.truncate(end)
        except OSError as error:
            raise cannot_write(self.path, error) from error


def as_json(value: Any) -> str:
    """Strict JSON: NaN and infinity, which it does not have, become null; what is no JSON is shown by its repr.

    A value without an end, or a number with more digits than Python shows, becomes the name of its type.
    """
    text = json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, default=_shown)
    return text.encode(errors="backslashreplace").decode()  # half of a surrogate pair becomes JSON's escape for it


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """The error for a file of the run that cannot be written."""
    return CheckpointError(
        f"cannot write {path}: {error.strerror or error}",
        remedy="make room or give rights there, then start the same command again: it goes on from the last "
        "checkpoint, if there is one",
    )


def _write_whole(file: int, data: bytes) -> None:
    size = os.fstat(file).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to tell; `cut_back` drops a torn line, too
            os.ftruncate(file, size)
        raise


def _is_up_to(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= step


def _shown(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}>"


def _finite(value: Any, around: tuple[int, ...] = ()) -> Any:
    """`around`: the ids of what `value` lies in."""
    is_endless = id(value) in around or len(around) > _DEEPEST
    if is_endless or (isinstance(value, int) and value.bit_length() > _MOST_BITS):
        return f"<{type(value).__name__}>"
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item, (*around, id(value))) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_finite(item, (*around, id(value))) for item in value]
    return value
