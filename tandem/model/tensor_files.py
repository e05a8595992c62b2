"""Tensors in safetensors files, written and read in ranges: by any number of ranks, none of which has a whole tensor.

A safetensors file is a header, which gives each tensor's dtype, shape and place, and then nothing but their bytes, in
row-major order. A `Shard` is a range of a tensor's elements, and so a range of a file. Every rank writes its own into
files that all ranks share, and reads its own, without a word to the others.

    write(folder, shards)       on every rank, with the same names, shapes and dtypes
    read(folder, into=shards)   into any other shards of the same tensors
    copy(folder, to)            from files to files

Source of the format: https://github.com/huggingface/safetensors ("Format"); of the index beside several files, and of
the files' names: https://huggingface.co/docs/transformers/big_models.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from itertools import groupby
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from tandem.model.delta import Delta
from tandem.model.shards import Shard

MAX_FILE_BYTES = 5 * 10**9
CHUNK_BYTES = 1 << 24  # what is copied at a time: all the memory that a move between a tensor and a file takes
_STEM = "model"  # of the names of files
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True)
class Piece:
    """What a tensor of a file is of one of the model's: a range of its elements, mostly all of them."""

    name: str  # the model's
    shape: tuple[int, ...]  # of the piece
    first_element: int = 0  # where the piece begins among the elements of the whole, in row-major order


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: what the header says of it."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


def write(
    folder: Path,
    shards: Mapping[str, Shard],
    *,
    pieces: Mapping[str, Piece] | None = None,
    dtype: torch.dtype | None = None,
    lead: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
    stem: str = _STEM,
) -> None:
    """Write this rank's primary shards. The files are whole once every rank has returned.

    Files of an earlier save into the same folder are overwritten, or removed.

    Args:
        folder: Made if missing; the same one for all ranks.
        shards: What this rank has of each tensor, on any device. All ranks name all tensors, in the same order.
        pieces: The tensors of the files, by their names there. None = those of `shards`.
        dtype: Of floating-point tensors in the files. None = as they are.
        lead: This rank writes headers and index. Exactly one does.
        max_file_bytes: A file grows to this size at most, or to that of its only tensor.
        stem: Of the files' names: `STEM.safetensors`, or several files and their index.

    Raises:
        OSError: A file cannot be written.
    """
    if pieces is None:
        pieces = {name: Piece(name, shard.shape) for name, shard in shards.items()}
    dtypes = {name: saved_dtype(shards[piece.name].tensor.dtype, dtype) for name, piece in pieces.items()}
    stored, headers = _plan(folder, pieces, dtypes, max_file_bytes, stem)
    for file, names in _opened(folder, stored, headers, lead=lead, stem=stem):
        for name in names:
            shard = shards[pieces[name].name]
            if shard.primary:
                _write_range(file, stored[name], pieces[name], shard)


def read(
    folder: Path,
    into: Mapping[str, Shard],
    *,
    find: Callable[[Iterable[str]], Mapping[str, Piece]] | None = None,
    stem: str = _STEM,
) -> None:
    """Fill the shards in place, cast to their dtypes, from the ranges of the files that they are.

    Args:
        folder, stem: With `STEM.safetensors`, or several files and their index.
        into: What this rank has of each tensor, on any device.
        find: From the names in the files to the pieces that they are. None = they are those of `into`. What is
            nowhere in `into` is not read.

    Raises:
        ValueError: A file is damaged; or tensors are missing or of other shapes: with all of their names.
        OSError: A file cannot be read.
    """
    stored = stored_tensors(folder, stem=stem)
    if find is None:
        pieces = {name: Piece(name, into[name].shape) for name in stored if name in into}
    else:
        pieces = {name: piece for name, piece in find(stored).items() if piece.name in into}
    if problems := _problems(stored, pieces, into):
        shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise ValueError(f"the tensors in {folder} do not fit: {shown}")
    buffer = bytearray(CHUNK_BYTES)
    for path, names in _by_file({name: stored[name] for name in pieces}):
        with open(path, "rb") as file:
            for name in names:
                _read_range(file, stored[name], pieces[name], into[pieces[name].name], buffer)


def copy(
    source: Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    stem: str = _STEM,
    deltas: Mapping[str, Delta] | None = None,
) -> None:
    """Write the tensors of the files in `source` into files in `folder`, a chunk at a time.

    Args:
        source, stem: See `stored_tensors`.
        folder, dtype, max_file_bytes: See `write`.
        deltas: What to add on the way to tensors of these names, which are matrices.

    Raises:
        ValueError: There is no such file, or it is damaged.
        OSError: A file cannot be read, or not be written.
    """
    found = stored_tensors(source, stem=stem)
    pieces = {name: Piece(name, each.shape) for name, each in found.items()}
    dtypes = {name: saved_dtype(each.dtype, dtype) for name, each in found.items()}
    stored, headers = _plan(folder, pieces, dtypes, max_file_bytes, stem)
    buffer = bytearray(CHUNK_BYTES)
    for file, names in _opened(folder, stored, headers, lead=True, stem=stem):
        for name in names:
            _copy_tensor(found[name], file, stored[name], buffer, (deltas or {}).get(name))


def stored_tensors(folder: Path, *, stem: str = _STEM) -> dict[str, Stored]:
    """What the headers of the files in `folder` say; no tensor is read. See `read`.

    Raises:
        ValueError: There is no such file, or it is damaged.
        OSError: It cannot be read.
    """
    single, index = _single(folder, stem), _index(folder, stem)
    if single.is_file():
        files = {single.name}
    elif index.is_file():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is damaged: {error!r}") from error
    else:
        raise ValueError(f"{folder} has neither {single.name} nor {index.name}")
    stored: dict[str, Stored] = {}
    for name in sorted(files):
        stored.update(_read_header(folder / name))
    return stored


def _read_header(path: Path) -> dict[str, Stored]:
    """Which must agree with the length of the file: the end of a truncated one would be read as anything."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, path.stat().st_size)))
            header.pop("__metadata__", None)
            stored = {
                name: Stored(path, _DTYPES[each["dtype"]], tuple(each["shape"]), 8 + size + each["data_offsets"][0])
                for name, each in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged, or no safetensors file of plain numbers: {error!r}") from error
    end = max((each.offset + _num_bytes(each) for each in stored.values()), default=8 + size)
    if end != path.stat().st_size:
        raise ValueError(f"{path} is damaged: it has {path.stat().st_size} bytes, and its header tells of {end}")
    return stored


def _plan(
    folder: Path, pieces: Mapping[str, Piece], dtypes: Mapping[str, torch.dtype], max_file_bytes: int, stem: str
) -> tuple[dict[str, Stored], dict[Path, bytes]]:
    """Where each tensor goes, and the header of each file: the same on every rank, and as safetensors does it."""
    sizes = {name: math.prod(piece.shape) * dtypes[name].itemsize for name, piece in pieces.items()}
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=max_file_bytes
    )
    stored: dict[str, Stored] = {}
    headers: dict[Path, bytes] = {}
    for file, names in split.filename_to_tensors.items():
        fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
        places: dict[str, int] = {}
        end = 0
        for name in sorted(names, key=lambda name: (-dtypes[name].itemsize, name)):  # so that all are aligned
            places[name], end = end, end + sizes[name]
            shape, offsets = list(pieces[name].shape), [places[name], end]
            fields[name] = {"dtype": _CODES[dtypes[name]], "shape": shape, "data_offsets": offsets}
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        headers[folder / file] = len(text).to_bytes(8, "little") + text
        for name, place in places.items():
            stored[name] = Stored(folder / file, dtypes[name], pieces[name].shape, 8 + len(text) + place)
    return stored, headers


def _opened(
    folder: Path, stored: Mapping[str, Stored], headers: Mapping[Path, bytes], *, lead: bool, stem: str
) -> Iterator[tuple[BufferedWriter, list[str]]]:
    """Each file, to write this rank's part of its tensors; with all that is no tensor, if this rank leads."""
    folder.mkdir(parents=True, exist_ok=True)
    if lead:
        _remove_others(folder, headers, stem)
    for path, names in _by_file(stored):
        with open(path, "wb", opener=_without_truncation) as file:
            if lead:
                file.write(headers[path])
                last = stored[names[-1]]
                file.truncate(last.offset + _num_bytes(last))
            yield file, names
            file.flush()
            os.fsync(file.fileno())
    if lead and len(headers) > 1:
        _write_index(_index(folder, stem), stored)


def _write_range(file: BufferedWriter, stored: Stored, piece: Piece, shard: Shard) -> None:
    elements = shard.tensor.detach().reshape(-1)
    for first, last in _common_ranges(piece, shard, stored.dtype.itemsize):
        part = elements[first - shard.first_element : last - shard.first_element]
        part = part.to("cpu", stored.dtype, copy=True)  # memory that numpy has seen could not be given up any more
        file.seek(stored.offset + (first - piece.first_element) * stored.dtype.itemsize)
        file.write(part.view(torch.uint8).numpy().data)


@torch.no_grad()
def _read_range(file: BufferedReader, stored: Stored, piece: Piece, shard: Shard, buffer: bytearray) -> None:
    elements = shard.tensor.view(-1)
    for first, last in _common_ranges(piece, shard, stored.dtype.itemsize):
        file.seek(stored.offset + (first - piece.first_element) * stored.dtype.itemsize)
        file.readinto(memoryview(buffer)[: (last - first) * stored.dtype.itemsize])
        part = torch.frombuffer(buffer, dtype=stored.dtype, count=last - first)
        elements[first - shard.first_element : last - shard.first_element].copy_(part)


def _copy_tensor(
    found: Stored, file: BufferedWriter, stored: Stored, buffer: bytearray, delta: Delta | None = None
) -> None:
    item_bytes = found.dtype.itemsize
    size, step = math.prod(found.shape), len(buffer) // item_bytes
    if delta is not None:
        step -= step % found.shape[1]  # whole rows
    file.seek(stored.offset)
    with open(found.file, "rb") as source:
        source.seek(found.offset)
        for first in range(0, size, step):
            count = min(step, size - first)
            source.readinto(memoryview(buffer)[: count * item_bytes])
            part = torch.frombuffer(buffer, dtype=found.dtype, count=count)
            if delta is not None:
                part = _added(part.float(), delta, first, found.shape[1])
            part = part.to(stored.dtype)
            file.write(part.view(torch.uint8).numpy().data)


def _added(part: Tensor, delta: Delta, first: int, columns: int) -> Tensor:
    """The elements from `first` on of a matrix, whole rows, with what is added to them."""
    matrix = part.view(-1, columns)
    first_row = first // columns
    delta.add_to(matrix, [range(first_row, first_row + len(matrix))], [range(columns)])
    return part


def _common_ranges(piece: Piece, shard: Shard, item_bytes: int) -> Iterator[tuple[int, int]]:
    """The elements that both have, counted in the whole tensor, chunk by chunk."""
    start = max(piece.first_element, shard.first_element)
    end = min(piece.first_element + math.prod(piece.shape), shard.first_element + shard.tensor.numel())
    step = CHUNK_BYTES // item_bytes
    for first in range(start, end, step):
        yield first, min(first + step, end)


def _problems(stored: Mapping[str, Stored], pieces: Mapping[str, Piece], into: Mapping[str, Shard]) -> list[str]:
    found: Counter[str] = Counter()
    problems: list[str] = []
    for name, piece in pieces.items():
        found[piece.name] += math.prod(piece.shape)
        if stored[name].shape != piece.shape:
            problems.append(f"{name} has shape {stored[name].shape}, not {piece.shape}")
    for name, shard in into.items():
        wanted = math.prod(shard.shape)
        if found[name] == 0 < wanted:
            problems.append(f"{name} is missing")
        elif found[name] != wanted:
            problems.append(f"{name} has {found[name]} of its {wanted} elements")
    return problems


def _by_file(stored: Mapping[str, Stored]) -> Iterator[tuple[Path, list[str]]]:
    """The tensors of each file, in the order of their places."""
    names = sorted(stored, key=lambda name: (stored[name].file, stored[name].offset))
    for path, group in groupby(names, key=lambda name: stored[name].file):
        yield path, list(group)


def _num_bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * stored.dtype.itemsize


def saved_dtype(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Only numbers with a fraction are cast."""
    return asked if asked is not None and own.is_floating_point else own


def _without_truncation(path: str, flags: int) -> int:
    """Opens for writing a file that other ranks may have written to."""
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def _single(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.safetensors"


def _index(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.safetensors.index.json"


def _remove_others(folder: Path, files: Iterable[Path], stem: str) -> None:
    """Which are of an earlier save: a reader would take an old index for the new one's."""
    for path in (_single(folder, stem), _index(folder, stem), *folder.glob(f"{stem}-*-of-*.safetensors")):
        if path not in files:
            path.unlink(missing_ok=True)


def _write_index(path: Path, stored: Mapping[str, Stored]) -> None:
    total = sum(_num_bytes(each) for each in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: each.file.name for name, each in stored.items()}}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")
