"""From rollouts to packed micro-batches: which rows run together, and how they lie side by side.

The hidden state at a position predicts the next token, so a response's first log-prob comes from the last position
of its prompt, and its last token never has to be run at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tandem.batch import Rollouts
from tandem.model.packed_spans import QUERY_CHUNK, Fork, PackedSpans

Packing = Literal["auto", "shared_prefix", "varlen", "none"]


@dataclass(frozen=True)
class PackingOptions:
    """How sequences are packed: see the config's `trainer.packing` and `trainer.micro_batch_tokens`."""

    packing: Packing = "auto"
    max_tokens: int = 8192


@dataclass(frozen=True)
class Costs:
    """Floating-point operations of a forward pass."""

    per_token: float  # in the layers
    per_pair: float  # of a query and a key, in attention
    per_target: float  # in the head


@dataclass(frozen=True)
class PackedRow:
    """Sequences of several responses side by side, ready for the model.

    Hidden states at `index` predict `targets`; result i belongs to response `rows[i]`, token `columns[i]`.
    """

    tokens: Int[Tensor, "1 T"]
    positions: Int[Tensor, "1 T"]
    spans: PackedSpans
    index: Int[Tensor, " N"]
    targets: Int[Tensor, " N"]
    rows: Int[Tensor, " N"]  # position within the micro-batch, not within the rollouts
    columns: Int[Tensor, " N"]
    num_rows: int
    width: int

    def to_matrix(self, values: Float[Tensor, " N"]) -> Float[Tensor, "b L"]:
        """Lay per-token results out as a matrix, zeros elsewhere; differentiable."""
        matrix = values.new_zeros(self.num_rows, self.width)
        return matrix.index_put((self.rows, self.columns), values)


def micro_batches(rollouts: Rollouts, rows: Sequence[int], options: PackingOptions, costs: Costs) -> list[list[int]]:
    """Cut rows into micro-batches of at most `options.max_tokens` packed tokens; a longer sequence runs on its own.

    Rows of a group stay together where they fit, so that they can share their prompt; a group larger than the budget
    is cut and its prompt run again.
    """
    if options.packing == "none":
        return [[row] for row in rows]
    parts: list[list[int]] = []
    used = 0
    for piece, size in _pieces(rollouts, rows, options, costs):
        if parts and used + size <= options.max_tokens:
            parts[-1] += piece
            used += size
        else:
            parts.append(piece)
            used = size
    return parts


def _pieces(
    rollouts: Rollouts, rows: Sequence[int], options: PackingOptions, costs: Costs
) -> Iterator[tuple[list[int], int]]:
    """Groups, or parts of groups, that `pack` lays out in at most `max_tokens`; with the number of their tokens."""
    lengths = (rollouts.response_lengths - 1).tolist()
    for places in _by_group(rollouts, rows):
        prompt = len(rollouts.prompt_of(rows[places[0]]).tokens)
        piece: list[int] = []
        size = 0
        for row in (rows[place] for place in places):
            wider = [*piece, row]
            wider_size = _num_tokens(prompt, [lengths[member] for member in wider], options.packing, costs)
            if piece and wider_size > options.max_tokens:
                yield piece, size
                wider, wider_size = [row], prompt + lengths[row]
            piece, size = wider, wider_size
        yield piece, size


def _num_tokens(prompt: int, lengths: Sequence[int], packing: Packing, costs: Costs) -> int:
    copies = 1 if _shares(prompt, lengths, packing, costs) else len(lengths)
    return copies * prompt + sum(lengths)


def pack(rollouts: Rollouts, rows: Sequence[int], *, packing: Packing, costs: Costs, device: torch.device) -> PackedRow:
    """Lay the sequences of `rows` side by side. Every response has at least one token.

    Without rows it is one token that predicts nothing: a pass over it gives gradients of 0.
    """
    layout = _Layout(rollouts, rows)
    if not rows:
        layout.add_filler()
    for places in _by_group(rollouts, rows):
        prompt = len(rollouts.prompt_of(rows[places[0]]).tokens)
        if _shares(prompt, [len(layout.responses[place]) - 1 for place in places], packing, costs):
            layout.add_shared(places)
        else:
            for place in places:
                layout.add_alone(place)
    return layout.finish(device)


class _Layout:
    """Collects tokens and spans, group by group."""

    def __init__(self, rollouts: Rollouts, rows: Sequence[int]) -> None:
        self.rollouts = rollouts
        self.rows = rows
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[tuple[int, int]] = []
        self.forks: list[Fork] = []
        self.index: list[int] = []
        self.targets: list[int] = []
        self.out_rows: list[int] = []
        self.out_columns: list[int] = []
        self.responses = [rollouts.response_tokens[row, : int(rollouts.response_lengths[row])].tolist() for row in rows]

    def add_shared(self, places: Sequence[int]) -> None:
        """The prompt once, then each response without its last token."""
        prompt = self._add_prompt(places[0])
        ranges: list[tuple[int, int]] = []
        for place in places:
            body = self._add_response(place, last_of_prompt=prompt[1] - 1, offset=prompt[1] - prompt[0])
            if body[1] > body[0]:
                ranges.append(body)
        if ranges:
            self.forks.append(Fork(prompt, tuple(ranges)))
        else:
            self.segments.append(prompt)

    def add_alone(self, place: int) -> None:
        """Prompt and response as one causal segment."""
        prompt = self._add_prompt(place)
        body = self._add_response(place, last_of_prompt=prompt[1] - 1, offset=prompt[1] - prompt[0])
        self.segments.append((prompt[0], body[1]))

    def add_filler(self) -> None:
        """A token without a response."""
        self.tokens.append(0)
        self.positions.append(0)
        self.segments.append((0, 1))

    def _add_prompt(self, place: int) -> tuple[int, int]:
        tokens = self.rollouts.prompt_of(self.rows[place]).tokens
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(len(tokens)))
        return start, start + len(tokens)

    def _add_response(self, place: int, *, last_of_prompt: int, offset: int) -> tuple[int, int]:
        response = self.responses[place]
        start = len(self.tokens)
        self.tokens.extend(response[:-1])
        self.positions.extend(range(offset, offset + len(response) - 1))
        self.index.append(last_of_prompt)
        self.index.extend(range(start, start + len(response) - 1))
        self.targets.extend(response)
        self.out_rows.extend([place] * len(response))
        self.out_columns.extend(range(len(response)))
        return start, start + len(response) - 1

    def finish(self, device: torch.device) -> PackedRow:
        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return PackedRow(
            tokens=tensor(self.tokens)[None],
            positions=tensor(self.positions)[None],
            spans=PackedSpans(len(self.tokens), self.segments, self.forks, device),
            index=tensor(self.index),
            targets=tensor(self.targets),
            rows=tensor(self.out_rows),
            columns=tensor(self.out_columns),
            num_rows=len(self.rows),
            width=self.rollouts.response_tokens.shape[1],
        )


def _shares(prompt: int, lengths: Sequence[int], packing: Packing, costs: Costs) -> bool:
    """Whether responses to one prompt, of which so many tokens are run, share one copy of it."""
    if packing != "auto":
        return packing == "shared_prefix"
    return len(lengths) > 1 and shared_cost(prompt, lengths, costs) <= separate_cost(prompt, lengths, costs)


def shared_cost(prompt: int, lengths: Sequence[int], costs: Costs) -> float:
    """Operations when the prompt runs once: masked attention computes whole rectangles, chunk by chunk."""
    longest = max(lengths)
    pairs = prompt * prompt / 2
    for start in range(0, longest, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, longest)
        pairs += len(lengths) * (stop - start) * (prompt + stop)
    return costs.per_token * (prompt + sum(lengths)) + costs.per_pair * pairs


def separate_cost(prompt: int, lengths: Sequence[int], costs: Costs) -> float:
    """Operations when each sequence runs on its own: causal attention computes half a square."""
    tokens = sum(prompt + length for length in lengths)
    pairs = sum((prompt + length) ** 2 / 2 for length in lengths)
    return costs.per_token * tokens + costs.per_pair * pairs


def _by_group(rollouts: Rollouts, rows: Sequence[int]) -> list[list[int]]:
    """Positions within `rows`, gathered by group, in order of first appearance."""
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(int(rollouts.group_ids[row]), []).append(place)
    return list(groups.values())
