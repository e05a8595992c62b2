"""GDPO: several rewards at once, each compared within the group on its own scale before they are added up.

    A_ik = (r_ik - mean of r_k over i's group) / (std of r_k over i's group + eps)        for each reward k
    A_i  = sum_k w_k A_ik / (std of the sums over the step + eps)

Where GRPO adds the rewards first, different mixtures of them become the same advantage, and the reward with the widest
range drowns the others. (The sums of a group have mean 0, so the paper's normalisation over the step only divides.)

The single rewards are the numbers that a reward function returns beside its score,

    def score(response, ground_truth):
        right, short = float(response.strip() == ground_truth), float(len(response) < 100)
        return {"score": right + short, "right": right, "short": short}

and they get to `gdpo` as `components`. Say which ones count, and for how much:

    from functools import partial
    from gdpo import gdpo

    td.train(td.load_config("run.yaml"), advantage=partial(gdpo, weights={"right": 1.0, "short": 0.5}))

or in a loop of your own

    advantages = gdpo(components=rewards.components, valid=rewards.valid, group_ids=rollouts.group_ids,
                      weights={"right": 1.0, "short": 0.5})

Source: GDPO, Group reward-Decoupled Normalization Policy Optimization (arXiv:2601.05242).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import tandem as td

EPS = 1e-6


def gdpo(
    *,
    components: Mapping[str, Tensor],
    valid: Tensor,
    group_ids: Tensor,
    weights: Mapping[str, float] | None = None,
    **_: object,
) -> Tensor:
    """Advantages [B]. A response without one of the rewards is left out of that one's groups only.

    Raises:
        ValueError: The reward function returns none of these numbers beside its score, or not all of `weights`.
    """
    weights = dict.fromkeys(components, 1.0) if weights is None else weights
    if not weights or set(weights) - set(components):
        raise ValueError(
            f"gdpo needs rewards beside the score: {sorted(weights)}; the reward function returns {sorted(components)}"
        )
    total = torch.zeros(valid.shape, dtype=torch.float64)
    for name, weight in weights.items():
        rewards = components[name]
        there = valid & rewards.isfinite()
        total += weight * td.grpo_advantages(rewards, group_ids, valid=there, normalize_std="group", eps=EPS)
    return total / (total[valid].std() + EPS) if int(valid.sum()) > 1 else total
