"""Advantages of responses: how much better one is than the others of its group."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tandem.algorithm.groups import Groups
from tandem.algorithm.whitening import whiten

Normalization = Literal["none", "group", "batch"]


def grpo_advantages(
    rewards: Float[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    *,
    valid: Bool[Tensor, " B"] | None = None,
    normalize_std: bool | Normalization = False,
    eps: float = 1e-6,
) -> Float[Tensor, " B"]:
    """Score each response against the mean reward of its own group.

    A_i = r_i - mean of r over i's group; with `normalize_std` divided by (std of r + eps)

    Args:
        rewards: Reward of each response, in the reward function's own unit.
        group_ids: The prompt each response answers. Groups may be interleaved and of any size.
        valid: False where there is no reward; such responses get 0 and do not count in their group. None = all.
        normalize_std: "group" or True: divide by the sample standard deviation (divisor G - 1) of i's group, as the
            GRPO paper does. "batch": by that of all valid rewards, as Lite PPO does. "none" or False: do not divide,
            as Dr. GRPO does.
        eps: Added to the standard deviation, in the reward's unit.

    Returns:
        float32, no gradient. Each group sums to 0; a group of equal rewards, or with fewer than two valid ones, is
        exactly 0.

    Raises:
        ValueError: A valid reward is not finite, or the arguments do not fit together.

    Source:
        DeepSeekMath (arXiv:2402.03300), 4.1.2; Dr. GRPO (arXiv:2503.20783); Lite PPO (arXiv:2508.08221).
    """
    if normalize_std not in (False, True, "none", "group", "batch"):
        raise ValueError(f"unknown normalize_std {normalize_std!r}; choose none, group or batch")
    groups = Groups.of(rewards, group_ids, valid)
    centred = groups.centred()
    if normalize_std in (True, "group"):
        variance = groups.sum(centred.square()) / (groups.sizes - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[groups.index]
    elif normalize_std == "batch" and int(groups.valid.sum()) > 1:
        centred = centred / (groups.rewards[groups.valid].std() + eps)
    return centred.float()


def rloo_advantages(
    rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], *, valid: Bool[Tensor, " B"] | None = None
) -> Float[Tensor, " B"]:
    """Score each response against the mean reward of the others of its group (leave one out).

    A_i = r_i - mean of r_j over j != i in i's group = G / (G - 1) * (r_i - mean of r over i's group)

    The mean of the others does not depend on response i, so this baseline leaves the gradient unbiased.

    Args:
        rewards: Reward of each response, in the reward function's own unit.
        group_ids: The prompt each response answers. Groups may be interleaved and of any size G.
        valid: False where there is no reward; such responses get 0 and do not count in their group. None = all.

    Returns:
        float32, no gradient. Each group sums to 0; a group of equal rewards, or with fewer than two valid ones, is
        exactly 0.

    Raises:
        ValueError: A valid reward is not finite, or the arguments do not fit together.

    Source:
        Back to Basics (arXiv:2402.14740), on RLOO; Kool, van Hoof and Welling, Buy 4 REINFORCE Samples, Get a Baseline
        for Free! (2019).
    """
    groups = Groups.of(rewards, group_ids, valid)
    scale = groups.sizes.double() / (groups.sizes - 1).clamp(min=1)
    return (groups.centred() * scale[groups.index]).float()


def reinforce_plus_plus_baseline_advantages(
    rewards: Float[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    response_mask: Bool[Tensor, "B L"],
    *,
    valid: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, "B L"]:
    """Score each response against the mean reward of its group, on the scale of the whole batch.

    A_it = whitened over all tokens t in the loss (r_i - mean of r over i's group)

    The tokens of a response all have its advantage, so long responses count for more in the mean and the standard
    deviation. Groups without contrast count there too, but keep their 0: the shift of the others is none of theirs.

    Args:
        rewards: Reward of each response, in the reward function's own unit.
        group_ids: The prompt each response answers. Groups may be interleaved and of any size.
        response_mask: True on the tokens that enter the loss.
        valid: False where there is no reward; such responses get 0 and do not count. None = all.

    Returns:
        float32, no gradient, 0 outside of the mask. A group of equal rewards, or with fewer than two valid ones, is
        exactly 0.

    Raises:
        ValueError: A valid reward is not finite, or the arguments do not fit together.

    Source:
        REINFORCE++ (arXiv:2501.03262), on REINFORCE++ w/ Baseline.
    """
    groups = Groups.of(rewards, group_ids, valid)
    whitened = whiten(groups.centred()[:, None].expand(response_mask.shape), response_mask & groups.valid[:, None])
    return torch.where(groups.contrast[groups.index][:, None], whitened, 0.0).float()
