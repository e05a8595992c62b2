"""Tensors leave the device for a while: their memory is free for others, and their content comes back into it later.

A tensor stays the same object, and so does its storage, which has no bytes meanwhile. Whoever holds the tensor or a
view of it sees the content again afterwards: the optimizer its moments, FSDP its flat shards.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, UntypedStorage

from tandem.errors import TrainingError
from tandem.observe.memory import return_freed_memory

_BLOCK = 16 * 2**20  # bytes moved at once; a power of two, since page-locked memory is rounded up to one

Blocks = Iterable[Sequence[Tensor]]  # all bytes that are moved, as uint8 pieces; those of one item fill a block


class _Place(Protocol):
    """Where content is kept."""

    def write(self, blocks: Blocks) -> None:
        """Take a copy."""
        ...

    def read(self, blocks: Blocks) -> None:
        """Fill what was written into pieces of the same sizes."""
        ...

    def close(self) -> None:
        """Forget it."""
        ...


class Offload:
    """Keeps the content of a set of tensors, while they are away.

    Args:
        kind: Where to: "host" = memory of this machine, page-locked for a GPU and kept for the next time; "disk" = a
            file; "none" = tensors stay where they are.
        folder: For "disk": where the file is. It has no name, so that nothing is left of it, however the process ends.

    Raises:
        TrainingError: There can be no file in the folder.
    """

    def __init__(self, kind: Literal["none", "host", "disk"], folder: Path | None = None) -> None:
        self._place: _Place | None = None
        if kind == "host":
            self._place = _Host()
        elif kind == "disk":
            assert folder is not None
            self._place = _Disk(folder)
        self._sizes: dict[UntypedStorage, int] = {}  # of what is away, in bytes

    def away(self, tensors: Iterable[Tensor]) -> None:
        """Free the memory of these tensors and remember their content. Tensors that share memory are moved once.

        Where tensors are away already nothing happens: they are the same ones.

        Their memory must be PyTorch's own: that of a mapped file, or one that `numpy()` was called on, cannot be freed.

        Raises:
            TrainingError: The disk is full or the like; then all tensors are as they were.
        """
        if self._place is None or self._sizes:
            return
        sizes = _sizes(tensors)
        self._place.write(_blocks(sizes))
        _synchronize(sizes)
        self._sizes = sizes
        for storage in sizes:
            storage.resize_(0)
        if any(storage.device.type == "cpu" for storage in sizes):
            return_freed_memory()

    def back(self) -> None:
        """Give all that is away its memory and content again. Does nothing where nothing is away.

        Raises:
            TrainingError: The file cannot be read.
        """
        if self._place is None or not self._sizes:
            return
        for storage, size in self._sizes.items():
            storage.resize_(size)
        self._place.read(_blocks(self._sizes))
        _synchronize(self._sizes)
        self._sizes = {}

    def close(self) -> None:
        """Give up file and host memory, with the content of what is away."""
        if self._place is not None:
            self._place.close()
        self._place = None
        self._sizes = {}


class _Host:
    """Blocks of host memory; from and to page-locked ones a GPU copies by itself and at full speed."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # for the next time: locking pages takes longer than copying them

    def write(self, blocks: Blocks) -> None:
        """See `_Place`."""
        for index, pieces in enumerate(blocks):
            if index == len(self._kept):
                on_gpu = any(piece.is_cuda for piece in pieces)
                self._kept.append(torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=on_gpu))
            _pack(pieces, self._kept[index])

    def read(self, blocks: Blocks) -> None:
        """See `_Place`."""
        for pieces, kept in zip(blocks, self._kept, strict=False):
            _unpack(kept, pieces)

    def close(self) -> None:
        """See `_Place`."""
        self._kept.clear()


class _Disk:
    """A file without a name, written over from its beginning each time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - `close` closes it
        except OSError as error:
            raise self._failure("write", error) from error

    def write(self, blocks: Blocks) -> None:
        """See `_Place`. In the end the bytes are on the disk: before that they would still take up memory."""
        buffer = torch.empty(_BLOCK, dtype=torch.uint8)
        try:
            self._file.seek(0)
            for pieces in blocks:
                rest = buffer.numpy().data[: _pack(pieces, buffer)]
                while rest:
                    rest = rest[os.write(self._file.fileno(), rest) :]
            self._file.truncate()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failure("write", error) from error

    def read(self, blocks: Blocks) -> None:
        """See `_Place`."""
        buffer = torch.empty(_BLOCK, dtype=torch.uint8)
        try:
            self._file.seek(0)
            for pieces in blocks:
                rest = buffer.numpy().data[: sum(map(len, pieces))]
                while rest:
                    count = os.readv(self._file.fileno(), [rest])
                    if count == 0:
                        raise OSError("the file has become shorter")
                    rest = rest[count:]
                _unpack(buffer, pieces)
        except OSError as error:
            raise self._failure("read", error) from error

    def close(self) -> None:
        """See `_Place`."""
        self._file.close()

    def _failure(self, verb: str, error: OSError) -> TrainingError:
        return TrainingError(
            f"cannot {verb} offloaded tensors in {self._folder}: {error.strerror or error}",
            remedy="make room or give rights there, then start the same command again; or set trainer.offload=none, if "
            "weights, moments, KV cache and activations fit into memory together",
        )


def _sizes(tensors: Iterable[Tensor]) -> dict[UntypedStorage, int]:
    """The memory of the tensors, each piece of it once, and its bytes; without what is empty."""
    sizes: dict[UntypedStorage, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()  # the same object for all tensors that share it
        if storage.nbytes() > 0:
            assert storage.resizable(), "this memory has another owner: a mapped file, a numpy array"
            sizes[storage] = storage.nbytes()
    return sizes


def _blocks(storages: Iterable[UntypedStorage]) -> Iterator[Sequence[Tensor]]:
    """See `Blocks`. Small tensors share a block, large ones are cut."""
    pieces: list[Tensor] = []
    room = _BLOCK  # left in the block
    for storage in storages:
        rest = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        while len(rest) > 0:
            pieces.append(rest[:room])
            room -= len(pieces[-1])
            rest = rest[len(pieces[-1]) :]
            if room == 0:
                yield pieces
                pieces = []
                room = _BLOCK
    if pieces:
        yield pieces


def _pack(pieces: Sequence[Tensor], block: Tensor) -> int:
    """Copy pieces into a block, one behind the other; return their bytes."""
    sizes = [len(piece) for piece in pieces]
    for piece, part in zip(pieces, block[: sum(sizes)].split(sizes), strict=True):
        part.copy_(piece, non_blocking=block.is_pinned())
    return sum(sizes)


def _unpack(block: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy what `_pack` has put into a block back into the pieces."""
    sizes = [len(piece) for piece in pieces]
    for piece, part in zip(pieces, block[: sum(sizes)].split(sizes), strict=True):
        piece.copy_(part, non_blocking=block.is_pinned())


def _synchronize(storages: Iterable[UntypedStorage]) -> None:
    """Wait until copies have been made: the memory may be used on another stream next."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
