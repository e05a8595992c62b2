"""Which responses each optimizer update sees, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from tandem.batch import Rollouts

Shuffle = Literal["groups", "responses", "none"]


def mini_batches(
    rollouts: Rollouts, *, size: int | None, shuffle: Shuffle, epochs: int, seed: tuple[int, ...]
) -> Iterator[list[int]]:
    """Rows of each mini-batch, epoch after epoch; every row once in each.

    Args:
        rollouts: The step's responses.
        size: Responses in a mini-batch; the last one of an epoch may be smaller. None = all.
        shuffle: Whole groups (they then share prompts in packing), single responses, or nothing.
        epochs: Passes over the rollouts; each has its own order.
        seed: Of the order, such as (run seed, step). The order depends on nothing else.
    """
    count = len(rollouts)
    for epoch in range(epochs):
        order = list(range(count))
        if size is not None and size < count and shuffle != "none":
            generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([*seed, epoch])))
            order = _shuffled(rollouts, shuffle, generator)
        width = size or max(count, 1)
        for start in range(0, count, width):
            yield order[start : start + width]


def _shuffled(rollouts: Rollouts, shuffle: Shuffle, generator: np.random.Generator) -> list[int]:
    if shuffle == "responses":
        return generator.permutation(len(rollouts)).tolist()
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(rollouts.group_ids.tolist()):
        groups.setdefault(group, []).append(row)
    members = list(groups.values())
    return [row for number in generator.permutation(len(members)) for row in members[number]]
