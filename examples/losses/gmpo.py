"""GMPO: one ratio for a response, the geometric mean of its tokens' clipped ratios.

    d_t    = logprobs_t - old_logprobs_t, clipped to [-clip, clip] in the direction that the advantage asks for
    loss_i = -A_i * exp(mean of d_t over response i)

    from gmpo import gmpo

    td.train(config, loss=td.FunctionLoss(gmpo, aggregation="sequence_mean"))

A geometric mean hardly feels one token whose ratio is far out; so the range may be wide: clip = 0.4 is exp(-0.4) to
exp(0.4). A_i is the mean of the response's advantages.

Source:
    Geometric-Mean Policy Optimization (arXiv:2507.20673).
"""

from __future__ import annotations

import torch
from torch import Tensor


def gmpo(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, clip: float = 0.4, **_: object
) -> Tensor:
    """Token losses [b, L]: each token has its response's, so that `sequence_mean` is the mean over responses."""
    lengths = response_mask.sum(dim=1, keepdim=True).clamp(min=1)  # every matrix is 0 outside of the mask
    log_ratio = logprobs - old_logprobs
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=clip), log_ratio.clamp(min=-clip))
    of_response = (clipped.sum(dim=1, keepdim=True) / lengths).clamp(-20.0, 20.0)  # exp() stays finite
    advantage = advantages.sum(dim=1, keepdim=True) / lengths
    return (-advantage * of_response.exp()).expand_as(logprobs)
