"""What each slot of the decode grid is at, as tensors: no Python work per token and slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from tandem.rollout.noise import uniform_noise
from tandem.rollout.options import SamplingOptions

NOISE_BLOCK = 64  # positions of noise hashed in one go


class Slots:
    """State of the responses being written.

    Attributes:
        token: The newest token of each slot, [S]; 0 where the slot is idle.
        position: Where that token stands in its sequence, [S].
        ended: True where that token was the last one: an EOS or the one at the length limit, [S].
    """

    def __init__(self, slots: int, options: SamplingOptions, is_eos: Bool[Tensor, " V"]) -> None:
        """`is_eos` is True at each EOS id."""
        device = is_eos.device
        self._options = options
        self._is_eos = is_eos
        self._rows = torch.arange(slots, device=device)
        self.token = torch.zeros(slots, dtype=torch.int64, device=device)
        self.position = torch.zeros(slots, dtype=torch.int64, device=device)
        self.ended = torch.zeros(slots, dtype=torch.bool, device=device)
        self._active = torch.zeros(slots, dtype=torch.int64, device=device)
        self._count = torch.zeros(slots, dtype=torch.int64, device=device)
        self._prompt_ids = torch.zeros(slots, dtype=torch.int64, device=device)
        self._indices = torch.zeros(slots, dtype=torch.int64, device=device)
        length = options.max_response_length
        self._tokens = torch.zeros(slots, length, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(slots, length, dtype=torch.float32, device=device)
        self._noise = torch.zeros(slots, NOISE_BLOCK, dtype=torch.float64, device=device)
        self._column = 0  # of the noise block; the same for all slots, each at its own position

    def start(
        self,
        slots: Int64[Tensor, " m"],
        prompt_ids: Int64[Tensor, " m"],
        indices: Int64[Tensor, " m"],
        prompt_lengths: Int64[Tensor, " m"],
    ) -> Float64[Tensor, " m"]:
        """Begin responses in free slots. Returns the noise of their first tokens."""
        self._prompt_ids[slots] = prompt_ids
        self._indices[slots] = indices
        self.position[slots] = prompt_lengths - 1
        self._active[slots] = 1
        return self._uniform(slots, torch.zeros_like(slots)[:, None])[:, 0]

    def append_first(
        self, slots: Int64[Tensor, " m"], tokens: Int64[Tensor, " m"], logprobs: Float[Tensor, " m"]
    ) -> None:
        """Append their first token to responses that were begun."""
        self._append(slots, tokens, logprobs)
        self._hash(slots)

    def noise(self) -> Float64[Tensor, " S"]:
        """The noise of the next token of every slot."""
        if self._column == NOISE_BLOCK:
            self._column = 0
            self._hash(self._rows)
        return self._noise[:, self._column]

    def append(self, tokens: Int64[Tensor, " S"], logprobs: Float[Tensor, " S"]) -> None:
        """Append one token to every active slot."""
        self._column += 1
        self._append(self._rows, tokens, logprobs)

    def read(self, slots: Sequence[int], newest: int | None = None) -> list[list[int]]:
        """The tokens of each response so far, or its `newest` ones."""
        rows = torch.tensor(slots, dtype=torch.int64, device=self.token.device)
        counts = self._count[rows]
        width = int(counts.max()) if newest is None else newest
        columns = counts[:, None] - width + torch.arange(width, device=rows.device)
        tokens = self._tokens[rows[:, None], columns.clamp(min=0)].tolist()
        return [row[-min(count, width) :] for row, count in zip(tokens, counts.tolist(), strict=True)]

    def take(self, slots: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs of responses that have ended; their slots are idle from then on."""
        rows = torch.tensor(slots, dtype=torch.int64, device=self.token.device)
        counts = self._count[rows].tolist()
        tokens = self._tokens[rows, : max(counts)].tolist()
        logprobs = self._logprobs[rows, : max(counts)].tolist()
        for state in (self.token, self.position, self._active, self._count, self.ended):
            state[rows] = 0
        return [(tokens[i][:count], logprobs[i][:count]) for i, count in enumerate(counts)]

    def shrink(self, kept: Int64[Tensor, " m"]) -> None:
        """Keep only these slots, in this order."""
        self.token, self.position, self.ended = self.token[kept], self.position[kept], self.ended[kept]
        self._active, self._count = self._active[kept], self._count[kept]
        self._prompt_ids, self._indices = self._prompt_ids[kept], self._indices[kept]
        self._tokens, self._logprobs = self._tokens[kept], self._logprobs[kept]
        self._noise = self._noise[kept]
        self._rows = self._rows[: len(kept)]

    def _append(self, slots: Int64[Tensor, " m"], tokens: Int64[Tensor, " m"], logprobs: Float[Tensor, " m"]) -> None:
        counts = self._count[slots]  # idle slots write to their column 0, which nobody reads
        self._tokens[slots, counts] = tokens
        self._logprobs[slots, counts] = logprobs
        active = self._active[slots]
        self._count[slots] = counts + active
        self.position[slots] += active
        self.token[slots] = tokens * active
        at_limit = self._count == self._options.max_response_length
        self.ended = (self._is_eos[self.token] | at_limit) & self._active.bool()

    def _hash(self, slots: Int64[Tensor, " m"]) -> None:
        """Fill the noise block so that its current column is the next position of each slot."""
        columns = torch.arange(NOISE_BLOCK, device=slots.device) - self._column
        self._noise[slots] = self._uniform(slots, self._count[slots, None] + columns)

    def _uniform(self, slots: Int64[Tensor, " m"], positions: Int64[Tensor, "m k"]) -> Float64[Tensor, "m k"]:
        prompt_ids, indices = self._prompt_ids[slots, None], self._indices[slots, None]
        return uniform_noise(self._options.seed, self._options.step, prompt_ids, indices, positions)
