"""Rows: from parquet and jsonl files, folders of those, datasets of the hub, generators, or given as such."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.errors import DataError

_GENERATOR = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:/]+){0,2}")
_FILE_SUFFIX = re.compile(r"\.[A-Za-z]+")
_PARQUET_BATCH = 1024  # rows turned into Python objects at a time

GivenRows = Iterable[Mapping[str, Any]] | Callable[..., Iterable[Mapping[str, Any]]]
"""Rows that need no file: a list of mappings, a dataset, or a function that returns or yields mappings."""

Source = str | GivenRows

_SPLIT_WORDS = {"train": "train", "test": "test", "val": "validation", "dev": "validation", "eval": "validation"}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the data as plain Python objects, and where it stands, for error messages."""

    values: Mapping[str, Any]
    place: str  # "train.parquet, row 3", counted from 1; a line of a jsonl file counts empty ones, too


def read_rows(source: Source, *, seed: int = 0) -> Iterator[Row]:
    """Read the rows of one source, lazily and in their own order.

    Args:
        source: Rows themselves, a function that makes them (called like a generator, below), or a path, which is one of
            a file `x.parquet`, `x.jsonl` or `x.json` (one JSON object per line);
            a folder: all such files in it, in the order of their names;
            `name`, `name:split` or `name:subset:split`: a dataset of the Hugging Face hub, or a local folder laid
            out like one (then with a split). The split is `train` unless it is given;
            `file.py:name`: a generator, that is a function which returns or yields mappings. It is called without
            arguments, or with `seed=` where it has a parameter of that name.
        seed: For generators.

    Yields:
        The rows. Nested columns arrive as dicts and lists; what a generator yields is handed on untouched.

    Raises:
        DataError: The source is missing, unreadable, of another format, or has no rows; or a row is not a mapping.
            Errors inside a user's generator come through as they are.
    """
    empty = True
    for row in _open_path(source, seed) if isinstance(source, str) else _given_rows(source, seed):
        empty = False
        yield row
    if empty:
        remedy = "check that the file was written to the end" if isinstance(source, str) else None
        raise DataError(f"{name_of(source)}: it has no rows", remedy=remedy)


def name_of(source: Source) -> str:
    """What error messages call a source."""
    if isinstance(source, str):
        return source
    if inspect.isfunction(source):
        return source.__name__
    return type(source).__name__ if callable(source) else "given data"


def _open_path(path: str, seed: int) -> Iterator[Row]:
    generator = _GENERATOR.fullmatch(path)
    if generator is not None:
        file, name = Path(generator["file"]).expanduser(), generator["name"]
        return _made_rows(_load_function(file, name), f"{file}:{name}", seed)
    location = Path(path).expanduser()
    try:
        if location.is_dir():
            return _folder_rows(location)
        if location.is_file():
            return _file_rows(location)
        is_layout = Path(path.partition(":")[0]).expanduser().is_dir()
    except OSError as error:  # a folder above it may not be entered
        raise _unreadable(location, error) from error
    if is_layout or (_HUB_NAME.fullmatch(path) and not _FILE_SUFFIX.fullmatch(location.suffix)):
        return _hub_rows(path)
    raise DataError(
        f"{path}: no such file",
        remedy=f"paths are relative to the folder that the command runs in, here {Path.cwd()}",
    )


def _file_rows(path: Path) -> Iterator[Row]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: unknown format {path.suffix or '(no suffix)'}", remedy=f"use one of {', '.join(sorted(READERS))}"
        )
    return reader(path)


def _folder_rows(folder: Path) -> Iterator[Row]:
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in READERS)
    except OSError as error:
        raise _unreadable(folder, error) from error
    if not files:
        raise DataError(f"{folder}: no data files in this folder", remedy=f"use {', '.join(sorted(READERS))} files")
    splits = {split for file in files for word, split in _SPLIT_WORDS.items() if file.stem.lower().startswith(word)}
    if len(splits) > 1:  # training on the test set by accident would spoil the run, silently
        raise DataError(
            f"{folder}: its files are of different splits: {', '.join(sorted(splits))}",
            remedy=f"name one, as in {folder}:{min(splits)}, or one of the files",
        )
    for file in files:
        yield from _file_rows(file)


def _parquet_rows(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, f"{path}, row {number}")
    except pa.ArrowInvalid as error:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty") from error
        raise DataError(
            f"{path}: not a parquet file ({error})", remedy="write it anew, or name it .jsonl if that is what it holds"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _json_row(line, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file in UTF-8 ({error.reason})") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _json_row(line: str, place: str) -> Row:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error})", remedy="write one JSON object per line") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or thousands of brackets
        raise DataError(f"{place}: cannot be read: {error}", remedy="write long numbers as texts") from error
    return _checked_row(values, place)


def _checked_row(values: object, place: str) -> Row:
    if not isinstance(values, Mapping):
        raise DataError(
            f"{place}: a row is a mapping of columns to values, this is of type {type(values).__name__}",
            remedy="write each row as one object with named columns",
        )
    return Row(values, place)


def _hub_rows(path: str) -> Iterator[Row]:
    # Slow to import, and most runs read files.
    import datasets
    from datasets.exceptions import DatasetsError

    name, *rest = path.split(":")
    split = rest.pop() if rest else "train"
    subset = rest[0] if rest else None
    try:
        dataset = datasets.load_dataset(str(Path(name).expanduser()), subset, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"{path}: no file of this name, and as a dataset it cannot be loaded: {error}",
            remedy="check the path; for a dataset of the hub write name, name:split or name:subset:split",
        ) from error
    for number, values in enumerate(dataset, 1):
        yield _checked_row(values, f"{path}, row {number}")


def _given_rows(source: GivenRows, seed: int) -> Iterator[Row]:
    if callable(source):
        yield from _made_rows(source, name_of(source), seed)
    else:
        for number, values in enumerate(source, 1):
            yield _checked_row(values, f"{name_of(source)}, row {number}")


def _made_rows(function: Callable[..., object], label: str, seed: int) -> Iterator[Row]:
    parameters = inspect.signature(function).parameters
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in open_ended]
    if set(required) - {"seed"}:
        raise DataError(
            f"{label} asks for {', '.join(required)}",
            remedy="a generator takes no arguments, or `seed` alone; give the others defaults",
        )
    rows = function(seed=seed) if "seed" in parameters else function()
    if not isinstance(rows, Iterable):
        raise DataError(f"{label} returned {type(rows).__name__}", remedy="yield mappings, or return a list of them")
    for number, values in enumerate(rows, 1):
        yield _checked_row(values, f"{label}, row {number}")


def _load_function(file: Path, name: str) -> Callable[..., object]:
    module_name = f"tandem_generator_{zlib.crc32(bytes(file.absolute())):08x}"  # cannot hide a module of the user's
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise DataError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up the module that they are defined in
    neighbours = str(file.absolute().parent)
    sys.path.insert(0, neighbours)  # it can import them, as when it is run as a script
    try:
        spec.loader.exec_module(module)
    except (FileNotFoundError, PermissionError) as error:
        if error.filename is None or Path(error.filename) != file.absolute():
            raise  # the user's own code failed to open some other file
        raise _unreadable(file, error) from error
    finally:
        sys.path.remove(neighbours)
    function = vars(module).get(name)
    if not callable(function):
        names = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise DataError(
            f"{file}: it has no function {name!r}", remedy=f"it has: {', '.join(names) or 'no function at all'}"
        )
    return function


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    remedy = "check the permissions of the file and of the folders above it"
    return DataError(f"{path}: cannot be read: {reason}", remedy=remedy if isinstance(error, PermissionError) else None)


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".parquet": _parquet_rows,
    ".jsonl": _json_rows,
    ".json": _json_rows,
}
