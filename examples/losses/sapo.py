"""SAPO: a soft gate in the place of clipping.

    loss of a token = -A * (4 / tau) * sigmoid(tau * (ratio - 1)),   tau = tau_positive if A > 0 else tau_negative

    from sapo import sapo

    td.train(config, loss=td.FunctionLoss(sapo, aggregation="sequence_mean"))

At a ratio of 1 its gradient is that of the policy gradient, -A; further out, on both sides, it fades away. The larger
tau is, the faster; tokens with a negative advantage get the larger one, since they unsettle training more.

Source:
    Soft Adaptive Policy Optimization (arXiv:2511.20347).
"""

from __future__ import annotations

import torch
from torch import Tensor


def sapo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    **_: object,
) -> Tensor:
    """Token losses [b, L]."""
    ratio = (logprobs - old_logprobs).clamp(-20.0, 20.0).exp()  # finite: infinity times a slope of 0 is NaN
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -advantages * 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
