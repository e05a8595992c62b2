"""Two-digit addition, the data of `examples/addition.yaml`: `07+45=` is answered by `052`.

Of the 10,000 sums, 500 are held out: neither the warm start nor the training sees them. The warm start shows right
answers and, nearly half of the time, wrong ones. So the model learns to add but answers no better than it was taught,
and reinforcement learning has something to find: it makes what is right more likely.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

NUM_HELDOUT = 500
WRONG_SHARE = 0.45
WARM_START_ROUNDS = 10  # each round shows every sum once, with wrong answers of its own
LARGEST_SUM = 99 + 99


def train() -> Iterator[dict[str, Any]]:
    """The sums to train on: a prompt and the right answer."""
    for left, right in _pairs()[NUM_HELDOUT:]:
        yield {"data_source": "addition", "prompt": f"{left:02}+{right:02}=", "ground_truth": f"{left + right:03}"}


def heldout() -> Iterator[dict[str, Any]]:
    """The sums to evaluate on."""
    for left, right in _pairs()[:NUM_HELDOUT]:
        yield {"data_source": "addition", "prompt": f"{left:02}+{right:02}=", "ground_truth": f"{left + right:03}"}


def warm_start() -> Iterator[dict[str, Any]]:
    """The sums to train on, each several times, with an answer that is wrong nearly half of the time."""
    chance = random.Random(1)
    for _ in range(WARM_START_ROUNDS):
        for left, right in _pairs()[NUM_HELDOUT:]:
            answer = left + right
            if chance.random() < WRONG_SHARE:
                answer = chance.choice([other for other in range(LARGEST_SUM + 1) if other != left + right])
            yield {"prompt": f"{left:02}+{right:02}=", "response": f"{answer:03}"}


def compute_score(response: str, ground_truth: str) -> float:
    """1 for the right answer and nothing else, 0 otherwise."""
    return float(response == ground_truth)


def _pairs() -> list[tuple[int, int]]:
    """All pairs of two-digit numbers, in an order that is random but always the same; the first are held out."""
    pairs = [(left, right) for left in range(100) for right in range(100)]
    random.Random(0).shuffle(pairs)
    return pairs
