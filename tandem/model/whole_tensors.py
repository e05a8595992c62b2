"""Whole tensors of a model under the names of its files, one bucket after the other, on every rank.

whole = WholeTensors(ranks, model, shards, device=device)       once: the ranks agree on a plan
for name, tensor in whole.read(shards): ...                     each time the weights have changed

For whoever holds the model in a form of its own and takes tensors as they are published, such as vLLM. No rank has more
than a bucket of them at once, unless the reader keeps them or a single tensor is larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.model.delta import Delta
from tandem.model.file_names import FileNames, saved_buffers
from tandem.model.lora import Lora
from tandem.model.ranks import Ranks
from tandem.model.reshard import BUCKET_BYTES, Resharder
from tandem.model.shards import Shard
from tandem.model.tensor_files import Piece


class WholeTensors:
    """Puts tensors together from the ranks' shards. Every rank makes the same calls, and reads to the end.

    Args:
        ranks: All that have shards.
        model: Gives names, order and buffers; its parameters alone hold the weights where `shards` is empty.
        shards: What this rank has of each parameter, by the names without adapters; layouts only. Empty = the model is
            whole.
        names: Of the model's tensors in files. None = found out, which needs a model that is not sharded.
        dtype: Of the tensors that are handed out. A whole model's are handed out as they are.
        device: Where they are put together.
        lora: The model's adapters, which are merged into what is handed out.
        bucket_bytes: Memory for them, and as much again for what travels.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: PreTrainedModel,
        shards: Mapping[str, Shard],
        *,
        names: FileNames | None,
        dtype: torch.dtype,
        device: torch.device,
        lora: Lora | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._model = model
        self._lora = lora
        self._dtype = dtype
        self._device = device
        self._pieces: dict[str, dict[str, Piece]] = {}  # name in the model -> name in a file -> which part
        for file_name, piece in (names or FileNames(model)).written.items():
            self._pieces.setdefault(piece.name, {})[file_name] = piece
        for file_name, name in _tied_heads(model).items():
            self._pieces[name].setdefault(file_name, Piece(name, tuple(model.get_parameter(name).shape)))
        self._factors = [name for name in shards if lora is not None and name in lora.shapes]
        self._buckets: list[tuple[list[str], Resharder]] = []
        weights = {name: shard for name, shard in shards.items() if name not in self._factors}
        first = [self._factors] if self._factors else []  # what is added to the weights that follow
        for bucket in (*first, *self._in_buckets(weights, bucket_bytes)):
            source, target = {name: shards[name] for name in bucket}, self._target(shards, bucket, torch.device("meta"))
            self._buckets.append((bucket, Resharder(ranks, source, target, bucket_bytes=bucket_bytes)))
        self.bytes_moved = 0  # between ranks, by the last `read`, of all of them together

    def read(self, shards: Mapping[str, Shard]) -> Iterator[tuple[str, Tensor]]:
        """Names in files and tensors. Those of a bucket have memory of their own: the reader may keep them.

        Args:
            shards: As given before; their memory may have changed.
        """
        self.bytes_moved = 0
        whole = saved_buffers(self._model)
        deltas: Mapping[str, Delta] = {}
        if not self._buckets:
            parameters = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
            if self._lora is not None:
                parameters, deltas = self._lora.without_adapters(parameters), self._lora.deltas(parameters)
            whole |= parameters
        yield from self._named(whole, deltas)
        for bucket, resharder in self._buckets:
            target = self._target(shards, bucket, self._device)
            moved = resharder.run({name: shards[name] for name in bucket}, target)
            self.bytes_moved += moved.bytes_moved
            if self._lora is not None and bucket == self._factors:
                deltas = self._lora.deltas(target)
            else:
                yield from self._named(target, deltas)

    def _target(self, shards: Mapping[str, Shard], bucket: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        """Factors are float32, since they are not what is handed out."""
        dtype = torch.float32 if bucket == self._factors else self._dtype
        return {name: torch.empty(shards[name].shape, dtype=dtype, device=device) for name in bucket}

    def _named(self, tensors: Mapping[str, Tensor], deltas: Mapping[str, Delta]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            elements = (deltas[name].added_to(tensor) if name in deltas else tensor).reshape(-1)
            for file_name, piece in self._pieces[name].items():
                end = piece.first_element + math.prod(piece.shape)
                yield file_name, elements[piece.first_element : end].view(piece.shape)

    def _in_buckets(self, shards: Mapping[str, Shard], max_bytes: int) -> Iterator[list[str]]:
        """Neighbours in the model, so that the parts of a layer come together."""
        bucket: list[str] = []
        filled = 0
        for name, shard in shards.items():
            size = math.prod(shard.shape) * self._dtype.itemsize
            if bucket and filled + size > max_bytes:
                yield bucket.copy()
                bucket.clear()
                filled = 0
            bucket.append(name)
            filled += size
        if bucket:
            yield bucket


def _tied_heads(model: PreTrainedModel) -> dict[str, str]:
    """Other names of tied tensors, which files lack but readers may wait for: name -> that in the model."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every: Sequence[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}
