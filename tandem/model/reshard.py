"""Moves weights from one layout to another, between all ranks at once: from FSDP shards to tensor-parallel slices.

resharder = Resharder(ranks, shards, engine_parameters)     once: the ranks agree on a plan
moved = resharder.run(shards, engine_parameters)            each time the weights have changed

Each element goes from a rank that has it straight to each one that needs it, in the dtype in which it is needed. What
travels at once is a bucket, cut so that its buffers stay within a fixed size, however large a tensor is.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import UInt8
from torch import Tensor

from tandem.model.layouts import Piece, layout_of, local
from tandem.model.moves import Move, fill_buckets, kept_moves, least_bytes, plan_moves
from tandem.model.ranks import Ranks

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Moved:
    """What a move took."""

    bytes_moved: int  # between ranks, of all of them together
    bytes_least: int  # what the ranks needed and did not have themselves: no way of moving moves less
    buffer_bytes: int  # memory that this rank took for the time of the move
    seconds: float


class Resharder:
    """Fills the target's pieces with the source's values, on all ranks. Every rank makes the same calls.

    Args:
        ranks: All that take part.
        source: What this rank has, by name. Any two ranks have the same part of a tensor or nothing in common, all of
            them together have all of it.
        target: What this rank is to get, by the same names; tied tensors under one. May still be on "meta".
        bucket_bytes: Memory that a move may take on a rank, half to send and half to receive.
    """

    def __init__(
        self,
        ranks: Ranks,
        source: Mapping[str, Piece],
        target: Mapping[str, Piece],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        layouts = [{name: layout_of(piece) for name, piece in pieces.items()} for pieces in (source, target)]
        machines, have, need = zip(*ranks.gather((socket.gethostname(), *layouts)), strict=True)
        self._kept = kept_moves(ranks.rank, *layouts)
        self._buckets: list[_Bucket] = []
        self._bytes_moved = 0
        moves = plan_moves(have, need, machines)
        for bucket in fill_buckets(moves, num_ranks=ranks.size, max_bytes=bucket_bytes // 2):
            self._buckets.append(_Bucket.of(ranks, bucket))
            self._bytes_moved += sum(move.bytes for move in bucket)
        self._send_bytes = max((sum(bucket.send_sizes) for bucket in self._buckets), default=0)
        self._receive_bytes = max((sum(bucket.receive_sizes) for bucket in self._buckets), default=0)
        self._bytes_least = least_bytes(have, need)
        assert self._bytes_moved == self._bytes_least, "the sources do not make up whole tensors"

    @torch.no_grad()
    def run(self, source: Mapping[str, Piece], target: Mapping[str, Piece]) -> Moved:
        """Move the weights as they are now.

        Args:
            source: Pieces with the names and layouts that the plan was made for. Their memory may have changed.
            target: Likewise. They are overwritten.
        """
        begin = time.perf_counter()
        sources = {name: local(piece) for name, piece in source.items()}
        targets = {name: local(piece) for name, piece in target.items()}
        for move in self._kept:
            _part(targets, move, move.box.target).copy_(_part(sources, move, move.box.source))
        device = next(iter(targets.values())).device
        send = torch.empty(self._send_bytes, dtype=torch.uint8, device=device)
        receive = torch.empty(self._receive_bytes, dtype=torch.uint8, device=device)
        for bucket in self._buckets:
            bucket.move(sources, targets, send, receive)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # for the seconds
        buffer_bytes = self._send_bytes + self._receive_bytes
        return Moved(self._bytes_moved, self._bytes_least, buffer_bytes, time.perf_counter() - begin)


@dataclass(frozen=True)
class _Bucket:
    """What travels at once, as one rank sees it."""

    sends: list[Move]  # in the order of their receivers
    receives: list[Move]  # in the order of their senders
    send_sizes: list[int]  # bytes to each rank
    receive_sizes: list[int]  # bytes from each rank

    @staticmethod
    def of(ranks: Ranks, moves: Sequence[Move]) -> _Bucket:
        """This rank's share of a bucket."""
        sends = sorted((move for move in moves if move.source == ranks.rank), key=lambda move: move.target)
        receives = sorted((move for move in moves if move.target == ranks.rank), key=lambda move: move.source)
        send_sizes, receive_sizes = [0] * ranks.size, [0] * ranks.size
        for move in sends:
            send_sizes[move.target] += move.bytes
        for move in receives:
            receive_sizes[move.source] += move.bytes
        return _Bucket(sends, receives, send_sizes, receive_sizes)

    def move(
        self,
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        send: UInt8[Tensor, " S"],
        receive: UInt8[Tensor, " R"],
    ) -> None:
        """Pack, exchange, unpack."""
        send, receive = send[: sum(self.send_sizes)], receive[: sum(self.receive_sizes)]
        for move, packed in zip(self.sends, _packed(self.sends, send), strict=True):
            packed.copy_(_part(sources, move, move.box.source))
        dist.all_to_all_single(receive, send, self.receive_sizes, self.send_sizes)
        for move, packed in zip(self.receives, _packed(self.receives, receive), strict=True):
            _part(targets, move, move.box.target).copy_(packed)


def _packed(moves: Sequence[Move], buffer: UInt8[Tensor, " N"]) -> Iterator[Tensor]:
    """The place of each move in a buffer."""
    begin = 0
    for move in moves:
        end = begin + move.bytes
        yield buffer[begin:end].view(move.dtype).view(move.box.shape)
        begin = end


def _part(tensors: Mapping[str, Tensor], move: Move, start: Sequence[int]) -> Tensor:
    """The box of a move in this rank's memory."""
    return tensors[move.name][
        tuple(slice(first, first + size) for first, size in zip(start, move.box.shape, strict=True))
    ]
