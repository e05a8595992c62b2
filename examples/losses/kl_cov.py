"""KL-Cov: the tokens that would take most of the policy's entropy are held back by a penalty.

    cov_t  = (A_t - mean of A) * (old_logprobs_t - mean of old_logprobs)        means over all tokens of the step
    loss_t = -ratio_t * A_t,   + coef * |logprobs_t - old_logprobs_t| on the `share` of tokens of highest cov_t > 0

Which tokens these are is settled once for the whole step, by the smallest covariance among them: so it does not depend
on how the step is cut into mini-batches, micro-batches or ranks. The loss is made anew in each step:

    from kl_cov import kl_cov

    old_logprobs = rollouts.rollout_logprobs
    loss = kl_cov(advantages, old_logprobs, rollouts.response_mask)
    update = trainer.update(rollouts, advantages, old_logprobs, loss=loss)

The penalty acts from the second update of a step on: at a ratio of 1 its gradient is 0. The paper's code takes the
covariances anew in each micro-batch, with the log-probs of that moment.

Source:
    The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models (arXiv:2505.22617), 4.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def kl_cov(
    advantages: Tensor, old_logprobs: Tensor, response_mask: Tensor, *, share: float = 2e-4, coef: float = 1.0
) -> Callable[..., Tensor]:
    """The loss function of one step. Advantages are [B] or [B, L]. `share` is at least one token, more in a tie."""
    per_token = (advantages[:, None] if advantages.ndim == 1 else advantages).expand_as(old_logprobs)[response_mask]
    mean_advantage, mean_logprob = float(per_token.mean()), float(old_logprobs[response_mask].mean())

    def covariance(advantages: Tensor, old_logprobs: Tensor) -> Tensor:  # float32: the same to the bit in every part
        return (advantages.float() - mean_advantage) * (old_logprobs.float() - mean_logprob)

    covariances = covariance(per_token, old_logprobs[response_mask])
    number = min(max(1, int(share * len(covariances))), len(covariances))
    lowest = float(covariances.topk(number).values.min()) if number else float("inf")

    def loss(*, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, **_: object) -> Tensor:
        log_ratio = logprobs - old_logprobs
        cov = covariance(advantages, old_logprobs)
        penalized = (cov >= lowest) & (cov > 0.0)
        policy_gradient = -log_ratio.clamp(-20.0, 20.0).exp() * advantages
        return policy_gradient + torch.where(penalized, coef * log_ratio.abs(), 0.0)

    return loss
