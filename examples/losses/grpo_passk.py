"""Training for pass@k: only the best response of a group earns something, by how far it is ahead of the second best.

    A_i = max_j r_j - max_{j != i} r_j           j over i's group

That is what the best reward of the group loses without response i: 0 for all but the best one, and for that one too
where another is as good. It trains what is measured when k answers may be tried and the best one counts, so that the
policy keeps several ways open. Most groups teach nothing: use many responses per prompt (rollout.n).

    from grpo_passk import grpo_passk

    td.train(td.load_config("run.yaml"), advantage=grpo_passk)

or in a loop of your own

    advantages = grpo_passk(rewards=rewards.values, valid=rewards.valid, group_ids=rollouts.group_ids)

Source: Optimizing Language Models for Inference Time Objectives using Reinforcement Learning (arXiv:2503.19595), the
leave-one-out estimator; verl has it under this name.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grpo_passk(*, rewards: Tensor, valid: Tensor, group_ids: Tensor, **_: object) -> Tensor:
    """Advantages [B]; a group with fewer than two valid rewards has none to be ahead of, and is 0."""
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    for group in group_ids.unique():
        rows = ((group_ids == group) & valid).nonzero().flatten()
        if len(rows) > 1:
            (best, second), (first, _second) = rewards[rows].double().topk(2)
            advantages[rows[first]] = best - second
    return advantages
