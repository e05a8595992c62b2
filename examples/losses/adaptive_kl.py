"""Adaptive KL: the coefficient of the KL term follows the KL, so that this stays near a target.

    error = clip(KL / target - 1, -0.2, 0.2)
    coef  = coef * (1 + gain * error)             after each step

    from adaptive_kl import AdaptiveKl

    kl_coef = AdaptiveKl(coef=0.05, target=0.02)
    for step, batch in enumerate(prompts.take(100)):
        ...                                                     # rollouts, advantages: as in docs/library.md
        with workers.train_phase() as trainer:
            reference = trainer.ref_logprobs(rollouts)
            update = trainer.update(rollouts, advantages, ref_logprobs=reference, loss=kl_coef.loss())
        kl_coef.follow(update)

It is a controller around the loss, not a loss. The KL here is per token, as in all of Tandem; that of the paper is
summed over a response, so its targets (6 nats) are larger.

Source:
    Fine-Tuning Language Models from Human Preferences (arXiv:1909.08593), 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import tandem as td


@dataclass
class AdaptiveKl:
    """A coefficient that changes by at most `gain` times 20 % a step.

    Args:
        coef: The first coefficient.
        target: KL per token from the reference to the policy that is aimed at, in nats.
        gain: How fast it follows.
    """

    coef: float
    target: float
    gain: float = 0.1

    def loss(self) -> td.ClippedSurrogate:
        """The loss of the next step."""
        return td.ClippedSurrogate(kl_coef=self.coef, kl_estimator="k3")

    def follow(self, update: td.UpdateResult) -> None:
        """Take note of how far the policy went. Nothing changes where the update had no KL to report."""
        if update.kl is not None:
            error = min(max(update.kl / self.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + self.gain * error
