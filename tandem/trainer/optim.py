"""AdamW, its learning-rate schedule, and the gradient step that refuses non-finite numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tandem.errors import TrainingError
from tandem.trainer.weights import Weights


@dataclass(frozen=True)
class Schedule:
    """Learning rate of each step: a linear rise over `warmup_steps`, then constant, or a fall until `total_steps`.

    Args:
        lr: The highest.
        kind: What follows the warm-up.
        warmup_steps: Steps until `lr` is reached; step 1 has lr / warmup_steps.
        total_steps: The step at which linear and cosine reach `final`; None only for constant.
        final: Fraction of `lr` reached at the last step.
    """

    lr: float
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    final: float = 0.0

    def at(self, step: int) -> float:
        """Learning rate of step 1, 2, ..."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.kind == "constant" or self.total_steps is None:
            return self.lr
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        left = 1 - progress if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr * (self.final + (1 - self.final) * left)


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did. `grad_norm` is the norm before clipping."""

    taken: bool
    grad_norm: float


class Optimizer:
    """AdamW (arXiv:1711.05101) on the float32 weights, or on this rank's rows of them.

    Args:
        weights: What is updated.
        betas, weight_decay: AdamW's. Norms and biases decay like all weights, as in the reference implementations.
        max_grad_norm: Gradients of a larger norm are scaled down to it.
        max_skipped: Raise when more than so many updates in a row were not finite.
        lr_key: The config key that its learning rate comes from, for that message.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        max_skipped: int = 5,
        lr_key: str = "trainer.lr",
    ) -> None:
        self.weights = weights
        self.max_grad_norm = max_grad_norm
        self.max_skipped = max_skipped
        self.lr_key = lr_key
        self.betas = betas
        self.weight_decay = weight_decay
        self.reset()

    def reset(self) -> None:
        """Begin without moments and without skipped updates."""
        self.skipped_in_row = 0
        self.adamw = torch.optim.AdamW(
            list(self.weights.parameters()), lr=0.0, betas=self.betas, weight_decay=self.weight_decay, fused=True
        )

    def step(self, lr: float, *, loss_is_finite: bool) -> StepOutcome:
        """Clip, update, and clear the gradients. Without a finite loss and gradient nothing changes but a counter.

        Every rank must call it. The norm is that of all ranks' gradients, so all of them take the step, or none.

        Args:
            lr: Learning rate.
            loss_is_finite: Of the whole mini-batch, the same on every rank.

        Raises:
            TrainingError: Too many skipped in a row.
        """
        norm = self.weights.gradient_norm()
        finite = loss_is_finite and bool(torch.isfinite(norm))
        if finite:
            nn.utils.clip_grads_with_norm_(self.weights.parameters(), self.max_grad_norm, norm)
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self.weights.write_back()
        self.adamw.zero_grad(set_to_none=True)
        self._count(finite)
        return StepOutcome(taken=finite, grad_norm=float(norm))

    def _count(self, finite: bool) -> None:
        self.skipped_in_row = 0 if finite else self.skipped_in_row + 1
        if self.skipped_in_row > self.max_skipped:
            raise TrainingError(
                f"{self.skipped_in_row} updates in a row had a loss or gradient that is not finite; none was applied",
                remedy=f"lower {self.lr_key}, look at the last rollouts in the run folder, or resume from an earlier "
                "checkpoint; trainer.max_skipped_updates sets how many are tolerated",
            )
