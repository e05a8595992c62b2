"""Where keys and values live during a rollout, and how prompts and responses attend to them.

PromptSpans   prompts side by side in one row; each attends to itself, its keys and values are remembered
KVCache       per layer [slots, kv_heads, max_len, D], allocated once and never concatenated
CacheSpans    one new token in each slot, each slot at its own position
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tandem.model.attention import AttentionCall, additive, attend, causal_mask, for_heads, visible
from tandem.rollout.scheduler import round_up

# The keys that a decode step reads are a multiple of this, so that last bits do not depend on the longest slot.
VIEW = 32


class PromptSpans:
    """Prefill of a chunk of prompts. Implements `tandem.model.attention.Spans`.

    Attributes:
        lengths: Of the prompts as they lie in the row; best sorted, as neighbours of one length run as one batch.
        keys: Per layer [kv_heads, T, D], after the forward.
        values: Per layer [kv_heads, T, Dv].
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self.keys: list[Float[Tensor, "h T D"]] = []
        self.values: list[Float[Tensor, "h T Dv"]] = []

    def attend(self, call: AttentionCall) -> Float[Tensor, "1 T H Dv"]:
        """Causal attention of each prompt to itself."""
        assert call.layer == len(self.keys), "layers are called in order, each once"
        self.keys.append(call.key[0])
        self.values.append(call.value[0])
        outputs: list[Tensor] = []
        begin = 0
        for length, same in groupby(self.lengths):
            count = len(list(same))
            query, key, value = (
                tensor[0, :, begin : begin + count * length].unflatten(1, (count, length)).transpose(0, 1)
                for tensor in (call.query, call.key, call.value)
            )
            mask = None
            if call.sliding_window is not None and call.sliding_window < length:
                mask = for_heads(call, causal_mask(length, call.sliding_window, query.device)[None, None])
            output = attend(call, query, key, value, mask)  # [count, H, length, Dv]
            outputs.append(output.transpose(1, 2).flatten(0, 1))
            begin += count * length
        return torch.cat(outputs)[None]


class KVCache:
    """Keys and values of every slot.

    Memory starts as zeros, not as it comes: a masked key has weight 0, and 0 times an old NaN would still be NaN.
    """

    def __init__(self, prompts: PromptSpans, slots: int, max_len: int) -> None:
        """Allocate for the layers, heads and dtypes that a prefill has shown."""
        self.slots = slots
        self.max_len = max_len
        self.keys = [key.new_zeros(slots, key.shape[0], max_len, key.shape[2]) for key in prompts.keys]
        self.values = [value.new_zeros(slots, value.shape[0], max_len, value.shape[2]) for value in prompts.values]

    @staticmethod
    def slot_bytes(prompts: PromptSpans, max_len: int) -> int:
        """Memory of one slot."""
        tensors = [*prompts.keys, *prompts.values]
        return sum(tensor.shape[0] * max_len * tensor.shape[2] * tensor.element_size() for tensor in tensors)

    def fork(self, prompts: PromptSpans, slots: Int64[Tensor, " m"], begins: Int64[Tensor, " m"], length: int) -> None:
        """Copy prompts of one length, each starting at `begins` in its row, to the front of `slots`."""
        rows = begins[:, None] + torch.arange(length, device=begins.device)
        for cached, prefilled in zip([*self.keys, *self.values], [*prompts.keys, *prompts.values], strict=True):
            cached[:, :, :length].index_copy_(0, slots, prefilled[:, rows].transpose(0, 1))

    def shrink(self, kept: Int64[Tensor, " m"]) -> None:
        """Move slots `kept` to the front, in this order."""
        for cached in (*self.keys, *self.values):
            cached[: len(kept)] = cached[kept]


class CacheSpans:
    """One decode step: a token for each of the first S slots. Implements `tandem.model.attention.Spans`."""

    def __init__(self, cache: KVCache, positions: Int64[Tensor, " S"], longest: int) -> None:
        """`longest` is at least the largest position."""
        self._cache = cache
        self._positions = positions
        self._slots = torch.arange(len(positions), device=positions.device)
        self._seen = min(round_up(longest + 1, VIEW), cache.max_len)
        self._masks: dict[int | None, Float[Tensor, "S 1 1 n"]] = {}

    def attend(self, call: AttentionCall) -> Float[Tensor, "S 1 H Dv"]:
        """Store each slot's new key and value, then attend to all it has."""
        keys, values = self._cache.keys[call.layer], self._cache.values[call.layer]
        keys[self._slots, :, self._positions] = call.key[:, :, 0]
        values[self._slots, :, self._positions] = call.value[:, :, 0]
        grid = len(self._slots)
        output = attend(
            call, call.query, keys[:grid, :, : self._seen], values[:grid, :, : self._seen], self._mask(call)
        )
        return output.transpose(1, 2)

    def _mask(self, call: AttentionCall) -> Float[Tensor, "S 1 1 n"]:
        """One for all layers of the same window."""
        window = call.sliding_window
        if window not in self._masks:
            keys = torch.arange(self._seen, device=self._positions.device)
            distance = self._positions[:, None] - keys[None, :]
            self._masks[window] = for_heads(call, additive(visible(distance, window))[:, None, None])
        return self._masks[window]
