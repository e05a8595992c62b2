"""Supervised warm start: what the policy should roughly know before reinforcement learning sharpens it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tandem.config.data import DataConfig
from tandem.config.sft import SftConfig
from tandem.data.examples import load_examples
from tandem.hybrid.workers import Workers
from tandem.observe.console import Console

_FALL = 5  # the learning rate falls to 0 over the last fifth: at a constant one the last batches decide too much


def warm_start(
    workers: Workers, config: SftConfig, data: DataConfig, *, seed: int = 0, console: Console | None = None
) -> None:
    """Train on given answers by maximum likelihood, then forget the optimizer's moments.

    Args:
        workers: Whose policy is trained.
        config: Answers, number of optimizer steps, batch size, learning rate.
        data: How prompts are read and tokenised: the same as later.
        seed: Of the order.
        console: Shows the progress. None = one of its own.

    Raises:
        DataError: The answers cannot be read.
    """
    if config.train is None or config.steps == 0:
        return
    console = Console() if console is None else console
    with console.task("reading the answers for the warm start"):
        examples = load_examples(config.train, workers.tokenizer, data, seed=seed)
    with workers.train_phase() as trainer, console.task("warm start", config.steps) as task:
        for step, rows in enumerate(_batches(len(examples), config.batch_size, config.steps, seed)):
            batch = [examples[row] for row in rows]
            trainer.supervised_update(
                [example.prompt_tokens for example in batch],
                [example.response_tokens for example in batch],
                lr=config.lr * min(1.0, _FALL * (1 - step / config.steps)),
            )
            task.advance()
    workers.reset_optimizer()


def _batches(count: int, size: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Rows of each batch; every row once per epoch, each epoch in its own order."""
    left: list[int] = []
    epoch = 0
    for _ in range(steps):
        while len(left) < size:
            generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
            left += generator.permutation(count).tolist()
            epoch += 1
        yield left[:size]
        left = left[size:]
