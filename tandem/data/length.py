"""The length limit of prompts, and what happens to those above it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

OverLength = Literal["filter", "error", "left", "right", "middle"]
Cut = Literal["left", "right", "middle"]


def cut_to(tokens: Sequence[int], limit: int, side: Cut) -> Sequence[int]:
    """Cut `tokens` to `limit` of them, at the side named; shorter ones stay whole.

    `left` keeps the last tokens: the question at the end of a long context, but no BOS. `right` keeps the first ones:
    what a chat template writes at the end, to open the assistant's turn, is lost. `middle` keeps the first half of the
    limit, rounded down, and fills up with the last ones.
    """
    if len(tokens) <= limit:
        return tokens
    if side == "left":
        return tokens[-limit:]
    if side == "right":
        return tokens[:limit]
    first = limit // 2
    return [*tokens[:first], *tokens[first - limit :]]
