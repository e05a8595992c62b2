"""Clip-Cov: some of the tokens that would take most of the policy's entropy get no gradient.

    cov_t = (A_t - mean of A) * (logprobs_t - mean of logprobs)         means over all tokens of the step

A likely token with a high advantage (cov_t high) makes the policy surer of itself. Of those with cov_t in (low, high),
`share` times all tokens are drawn, and have no gradient.

A token without a gradient is one of advantage 0, which stays in every denominator. So this is no loss of its own but a
change of the advantages, made once for the whole step, and does not depend on how the step is cut into mini-batches,
micro-batches or ranks:

    from clip_cov import clip_cov

    advantages = clip_cov(advantages, rollouts.rollout_logprobs, rollouts.response_mask, seed=step)
    update = trainer.update(rollouts, advantages)

The log-probs are those of the policy that the step begins with. The paper's code takes them, and the means, anew in
each micro-batch, and leaves out tokens that the clip range has stopped already.

Source:
    The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models (arXiv:2505.22617), 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clip_cov(
    advantages: Tensor,
    logprobs: Tensor,
    response_mask: Tensor,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    seed: int = 0,
) -> Tensor:
    """Advantages of each token, [B, L]: as given ([B] or [B, L]), and 0 for those that were drawn (at least one)."""
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    advantages = torch.where(response_mask, advantages, 0.0)
    covariance = (advantages - advantages[response_mask].mean()) * (logprobs - logprobs[response_mask].mean())
    candidates = (response_mask & (covariance > low) & (covariance < high)).nonzero()
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    drawn = candidates[order[: max(1, int(share * int(response_mask.sum())))]]
    advantages[drawn[:, 0], drawn[:, 1]] = 0.0
    return advantages
