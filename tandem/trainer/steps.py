"""The optimizer steps of one update, and what they report together."""

from __future__ import annotations

import math

from tandem.trainer.optim import Optimizer


class Steps:
    """Takes one optimizer step for each mini-batch of an update.

    Args:
        optimizer: Has the weights, and the gradients that were added up.
        lr: Learning rate of each step.
    """

    def __init__(self, optimizer: Optimizer, lr: float) -> None:
        self.lr = lr
        self.num_skipped = 0
        self._optimizer = optimizer
        self._taken: list[tuple[float, float]] = []  # loss and norm of the gradient

    def take(self, loss: float) -> None:
        """One step, unless something is not finite. Every rank must call it.

        Args:
            loss: Of the whole mini-batch, the same on every rank.

        Raises:
            TrainingError: Too many skipped in a row.
        """
        outcome = self._optimizer.step(self.lr, loss_is_finite=math.isfinite(loss))
        if outcome.taken:
            self._taken.append((loss, outcome.grad_norm))
        else:
            self.num_skipped += 1

    @property
    def num_taken(self) -> int:
        """Steps that changed the weights."""
        return len(self._taken)

    @property
    def loss(self) -> float:
        """Mean over the steps taken; 0 where there are none."""
        return sum(loss for loss, _ in self._taken) / max(self.num_taken, 1)

    @property
    def grad_norm(self) -> float:
        """Likewise of the gradients' norms, before clipping."""
        return sum(norm for _, norm in self._taken) / max(self.num_taken, 1)
