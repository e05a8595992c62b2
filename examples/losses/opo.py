"""OPO: the baseline of a group is the mean of its rewards, weighted by the lengths of its responses.

    A_i = r_i - sum_j l_j r_j / sum_j l_j        j over i's group, l_j = tokens of response j in the loss

A response pulls at the weights about as strongly as it is long. Among the baselines that are one number for each
prompt, this one then makes the gradient vary least. The paper updates once per step, on policy, without a KL term.

    from opo import opo

    td.train(td.load_config("run.yaml"), advantage=opo)

or in a loop of your own

    advantages = opo(rewards=rewards.values, valid=rewards.valid, group_ids=rollouts.group_ids,
                     response_mask=rollouts.response_mask)

Source: On-Policy RL with Optimal Reward Baseline (arXiv:2505.23585).
"""

from __future__ import annotations

import torch
from torch import Tensor


def opo(*, rewards: Tensor, valid: Tensor, group_ids: Tensor, response_mask: Tensor, **_: object) -> Tensor:
    """Advantages [B]; a group of equal rewards, or with fewer than two valid ones, is exactly 0."""
    lengths = response_mask.sum(dim=1).double()
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    for group in group_ids.unique():
        rows = (group_ids == group) & valid & (lengths > 0)
        if rows.any():
            # In float64 the sums are exact: the weighted mean of equal rewards is that reward.
            own, weights = rewards[rows].double(), lengths[rows]
            advantages[rows] = own - (weights * own).sum() / weights.sum()
    return advantages
