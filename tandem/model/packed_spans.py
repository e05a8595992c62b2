"""Attention over sequences that lie side by side in one row: the layout of training.

    [prompt 1][response 1.1][response 1.2] ... [prompt 2][response 2.1] ...

Prompts are causal segments. A response sees its prompt and itself, never its siblings, so each log-prob and gradient
is that of the sequence prompt + response on its own (shared-prefix packing; same idea as prefix sharing in inference,
applied to the forward and the backward pass). Segments of similar size are stacked and run as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tandem.model.attention import AttentionCall, additive, attend, causal_mask, for_heads, visible

QUERY_CHUNK = 1024  # a fork's responses run this many queries at a time, so that masks stay small
_WASTE = 1.25  # segments are stacked while padding costs at most this factor


@dataclass(frozen=True)
class Fork:
    """One prompt and the responses that share it, as half-open ranges of the row."""

    prompt: tuple[int, int]
    responses: tuple[tuple[int, int], ...]


@dataclass
class _CausalBlock:
    """Segments on their own, stacked: index [s, S] into the row, padded on the right with a token of the segment."""

    index: Int[Tensor, "s S"]
    starts: list[tuple[int, int]]  # (first token, length) of each, for laying the results back
    masks: dict[int, Tensor] = field(default_factory=dict)  # window -> mask, for all layers

    def run(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size, window = self.index.shape[1], call.sliding_window
        query, key, value = (_take(x, self.index) for x in (q, k, v))
        mask = None
        if window is not None and window < size:
            if window not in self.masks:
                self.masks[window] = for_heads(call, causal_mask(size, window, q.device)[None, None])
            mask = self.masks[window]
        return attend(call, query, key, value, mask).transpose(1, 2).flatten(0, 1)


@dataclass
class _ForkBlock:
    """Groups stacked: prompts [g, P], responses [g, G, R]; shorter ones are padded on the right."""

    prompt: Int[Tensor, "g P"]
    prompt_lengths: Int[Tensor, " g"]
    response: Int[Tensor, "g G R"]
    starts: list[tuple[int, int]]
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)  # (window, chunk) -> mask, for all layers

    def run(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, fan, size = self.response.shape
        flat = self.response.flatten(0, 1)
        query = _take(q, flat)
        key, value = (self._with_prompt(x, flat, fan) for x in (k, v))
        prompt_size = self.prompt.shape[1]
        outs = []
        for start in range(0, size, QUERY_CHUNK):
            stop = min(start + QUERY_CHUNK, size)
            seen = prompt_size + stop
            mask = self._mask(call, start, stop)
            outs.append(attend(call, query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], mask))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
        return out.transpose(1, 2).flatten(0, 1)

    def _with_prompt(self, x: Tensor, flat: Tensor, fan: int) -> Tensor:
        prompt = _take(x, self.prompt)
        prompt = prompt[:, None].expand(-1, fan, -1, -1, -1).flatten(0, 1)
        return torch.cat([prompt, _take(x, flat)], dim=2)

    def _mask(self, call: AttentionCall, start: int, stop: int) -> Tensor:
        window = call.sliding_window
        if (window, start) not in self.masks:
            device = self.prompt.device
            same = bool((self.prompt_lengths == self.prompt_lengths[0]).all())
            lengths = self.prompt_lengths[:1] if same else self.prompt_lengths
            rows = torch.arange(start, stop, device=device)[None, :, None]
            columns = torch.arange(self.prompt.shape[1], device=device)[None, None, :]
            own = torch.arange(stop, device=device)[None, None, :]
            n = lengths[:, None, None]
            prompt_seen = visible(n + rows - columns, window) & (columns < n)
            own_seen = visible(rows - own, window).expand(len(lengths), -1, -1)
            mask = additive(torch.cat([prompt_seen, own_seen], dim=2))
            if len(lengths) > 1:
                mask = mask.repeat_interleave(self.response.shape[1], dim=0)
            self.masks[window, start] = for_heads(call, mask[:, None])
        return self.masks[window, start]


class PackedSpans:
    """Attention spans of one packed row.

    Args:
        length: Tokens in the row.
        segments: Half-open ranges that are causal on their own, prompts of forks not included.
        forks: Prompts shared by several responses. Segments and forks together cover the row, each token once.
        device: Where the model runs.
    """

    def __init__(
        self, length: int, segments: Sequence[tuple[int, int]], forks: Sequence[Fork], device: torch.device
    ) -> None:
        alone = [*segments, *(fork.prompt for fork in forks)]
        blocks: list[_CausalBlock | _ForkBlock] = [_causal_block(part, device) for part in _stack_segments(alone)]
        blocks += [_fork_block(part, device) for part in _stack_forks(forks)]
        self.blocks = blocks
        self.order = _order(length, blocks, device)

    def attend(self, call: AttentionCall) -> Float[Tensor, "1 T H Dv"]:
        """Attention of every segment, laid back in the order of the row."""
        q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))  # [T, heads, D]
        outs = [block.run(call, q, k, v) for block in self.blocks]
        return torch.cat(outs).index_select(0, self.order)[None]


def _take(x: Float[Tensor, "T h D"], index: Int[Tensor, "s S"]) -> Float[Tensor, "s h S D"]:
    return x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def _stack_segments(segments: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Neighbours in length go together while padding stays cheap. Attention is quadratic, hence the squares."""
    parts: list[list[tuple[int, int]]] = []
    real = 0.0
    for segment in sorted(segments, key=lambda s: (s[0] - s[1], s[0])):  # longest first, so that it sets the size
        cost = float(segment[1] - segment[0]) ** 2
        if parts and _padded(parts[-1]) * (len(parts[-1]) + 1) <= _WASTE * (real + cost):
            parts[-1].append(segment)
            real += cost
        else:
            parts.append([segment])
            real = cost
    return parts


def _padded(part: Sequence[tuple[int, int]]) -> float:
    return float(part[0][1] - part[0][0]) ** 2


def _stack_forks(forks: Sequence[Fork]) -> list[list[Fork]]:
    def longest(fork: Fork) -> int:
        return max(stop - start for start, stop in fork.responses)

    def cost(fan: int, response: int, prompt: int) -> float:
        return float(fan * response * (prompt + response))

    def key(fork: Fork) -> tuple[int, int, int, int]:
        return (-len(fork.responses), fork.prompt[0] - fork.prompt[1], -longest(fork), fork.prompt[0])

    parts: list[list[Fork]] = []
    real, response, prompt = 0.0, 0, 0
    for fork in sorted(forks, key=key):
        size = fork.prompt[1] - fork.prompt[0]
        own = cost(len(fork.responses), longest(fork), size)
        if parts and len(fork.responses) == len(parts[-1][0].responses):
            joint = cost(len(fork.responses), max(response, longest(fork)), max(prompt, size)) * (len(parts[-1]) + 1)
            if joint <= _WASTE * (real + own):
                parts[-1].append(fork)
                real, response, prompt = real + own, max(response, longest(fork)), max(prompt, size)
                continue
        parts.append([fork])
        real, response, prompt = own, longest(fork), size
    return parts


def _padded_range(start: int, stop: int, size: int) -> Tensor:
    """start, start + 1, ... stop - 1, then the last token again: its results are not laid back."""
    return torch.arange(start, start + size).clamp_(max=stop - 1)


def _causal_block(part: Sequence[tuple[int, int]], device: torch.device) -> _CausalBlock:
    size = max(stop - start for start, stop in part)
    index = torch.stack([_padded_range(start, stop, size) for start, stop in part])
    return _CausalBlock(index=index.to(device), starts=[(start, stop - start) for start, stop in part])


def _fork_block(part: Sequence[Fork], device: torch.device) -> _ForkBlock:
    prompt_size = max(fork.prompt[1] - fork.prompt[0] for fork in part)
    size = max(stop - start for fork in part for start, stop in fork.responses)
    return _ForkBlock(
        prompt=torch.stack([_padded_range(*fork.prompt, prompt_size) for fork in part]).to(device),
        prompt_lengths=torch.tensor([fork.prompt[1] - fork.prompt[0] for fork in part], device=device),
        response=torch.stack(
            [torch.stack([_padded_range(start, stop, size) for start, stop in fork.responses]) for fork in part]
        ).to(device),
        starts=[(start, stop - start) for fork in part for start, stop in fork.responses],
    )


def _order(length: int, blocks: Sequence[_CausalBlock | _ForkBlock], device: torch.device) -> Int[Tensor, " T"]:
    """Where in the blocks' joined results each token of the row stands."""
    order = torch.full((length,), -1, dtype=torch.int64)
    base = 0
    for block in blocks:
        size = block.index.shape[1] if isinstance(block, _CausalBlock) else block.response.shape[2]
        for number, (start, count) in enumerate(block.starts):
            order[start : start + count] = torch.arange(count) + base + number * size
        base += len(block.starts) * size
    assert bool((order >= 0).all()), "segments and forks do not cover the row"
    return order.to(device)
