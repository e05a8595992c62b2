"""The order in which prompts are drawn: shuffled, mixed and resumable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class DrawOrder:
    """An endless sequence of (source, row), a function of the seed alone.

    Sources are mixed in proportion to their weights with the least possible unevenness: each draw goes to the source
    that is furthest behind its share. Each source runs through all its rows before it repeats one, each time in an
    order of its own.
    """

    def __init__(self, num_rows: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        """
        Args:
            num_rows: Rows of each source, each at least 1.
            weights: Weight of each source, above 0; only their ratios count.
            seed: At least 0.
            shuffle: False draws the rows of a source in their own order, every time.
        """
        self._num_rows = tuple(num_rows)
        self._shares = [weight / sum(weights) for weight in weights]
        self._seed = seed
        self._shuffle = shuffle
        self._counts = [0] * len(self._num_rows)
        self._passes: list[tuple[int, Sequence[int]]] = [(-1, ())] * len(self._num_rows)  # (pass, its order)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many rows have been drawn from each source: the whole state."""
        return tuple(self._counts)

    def move_to(self, counts: Sequence[int]) -> None:
        """Go on from where `counts` was read."""
        if len(counts) != len(self._num_rows):
            raise ValueError(f"counts of {len(counts)} sources, but there are {len(self._num_rows)}")
        self._counts = list(counts)

    def draw(self) -> tuple[int, int]:
        """The next (source, row)."""
        drawn = sum(self._counts) + 1
        behind = [share * drawn - count for share, count in zip(self._shares, self._counts, strict=True)]
        source = behind.index(max(behind))
        number, place = divmod(self._counts[source], self._num_rows[source])
        self._counts[source] += 1
        return source, self._order(source, number)[place]

    def _order(self, source: int, number: int) -> Sequence[int]:
        """The order of the rows of `source` on its pass number `number`."""
        if self._passes[source][0] != number:
            self._passes[source] = (number, self._new_order(source, number))
        return self._passes[source][1]

    def _new_order(self, source: int, number: int) -> Sequence[int]:
        if not self._shuffle:
            return range(self._num_rows[source])
        # Sorting raw words: numpy promises these to be the same in all its versions, but not `permutation`.
        words = np.random.PCG64(np.random.SeedSequence([self._seed, source, number])).random_raw(self._num_rows[source])
        order: list[int] = np.argsort(words, kind="stable").tolist()
        return order
