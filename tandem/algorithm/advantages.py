"""Advantages: how much better a response is than the others of its group."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tandem.algorithm.masked import loss_mask
from tandem.algorithm.protocols import AdvantageFunction
from tandem.batch import Rewards, Rollouts
from tandem.config.algorithm import AlgorithmConfig

Normalization = Literal["none", "group", "batch"]


def estimate_advantages(
    config: AlgorithmConfig, rewards: Rewards, rollouts: Rollouts, *, function: AdvantageFunction | None = None
) -> Float[Tensor, " B"] | Float[Tensor, "B L"]:
    """The advantages of one step's responses, by GRPO or by the user's own function.

    A response takes part if it has a reward and a token in the loss: what cannot be learned from must not move the mean
    of its group. The others get 0.

    Args:
        config: The section `algorithm`; `normalize_std` and `mask_truncated` matter here.
        rewards: One for each response.
        rollouts: The responses.
        function: Computes the advantages instead of `grpo_advantages`.

    Returns:
        Of each response; of each token where `function` says so. float32, no gradient.

    Raises:
        ValueError: A valid reward is not finite, or `function` returned no tensor, a wrong shape or something not
            finite.
    """
    mask = loss_mask(rollouts.response_mask, rollouts.truncated, mask_truncated=config.mask_truncated)
    valid = rewards.valid & mask.any(dim=1)
    if function is None:
        return grpo_advantages(rewards.values, rollouts.group_ids, valid=valid, normalize_std=config.normalize_std)
    # Copies: what a function does to them in place must not change the rollouts.
    advantages: object = function(
        rewards=rewards.values.clone(),
        valid=valid.clone(),
        group_ids=rollouts.group_ids.clone(),
        response_mask=mask.clone(),
    )
    if not isinstance(advantages, Tensor):
        raise ValueError(
            f"the advantage function {function!r} must return a tensor, it returned a {type(advantages).__name__}"
        )
    if advantages.shape not in (valid.shape, mask.shape):
        raise ValueError(
            f"the advantage function {function!r} must return shape {tuple(valid.shape)} or {tuple(mask.shape)}, "
            f"it returned {tuple(advantages.shape)}"
        )
    used = valid if advantages.ndim == 1 else valid[:, None] & mask
    advantages = torch.where(used, advantages.detach().float(), 0.0)
    if not bool(advantages.isfinite().all()):
        raise ValueError(f"the advantage function {function!r} returned a value that is not finite")
    return advantages


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
            GRPO paper does. "batch": by that of all valid rewards, as Lite PPO does. "none" or False: do not divide.
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
    groups = _Groups.of(rewards, group_ids, valid)
    centred = groups.rewards - (groups.sum(groups.rewards) / groups.sizes.clamp(min=1))[groups.index]
    # Rewards that are equal differ from their mean in the last bit, which a small standard deviation would blow up.
    centred = torch.where(groups.contrast[groups.index] & groups.valid, centred, 0.0)
    if normalize_std in (True, "group"):
        variance = groups.sum(centred.square()) / (groups.sizes - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[groups.index]
    elif normalize_std == "batch" and int(groups.valid.sum()) > 1:
        centred = centred / (groups.rewards[groups.valid].std() + eps)
    return centred.float()


class GroupCounts(NamedTuple):
    """How many groups a batch has, and how many of them teach nothing. The last two do not overlap."""

    num_groups: int
    without_contrast: int  # two or more valid rewards, all equal
    too_few_valid: int  # fewer than two valid rewards


def count_groups(
    rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], valid: Bool[Tensor, " B"] | None = None
) -> GroupCounts:
    """Count the groups whose advantages are all 0, by reason.

    Raises:
        ValueError: As `grpo_advantages`.
    """
    groups = _Groups.of(rewards, group_ids, valid)
    enough = groups.sizes > 1
    return GroupCounts(
        num_groups=len(groups.sizes),
        without_contrast=int((enough & ~groups.contrast).sum()),
        too_few_valid=int((~enough).sum()),
    )


def idle_groups(
    advantages: Float[Tensor, " B"] | Float[Tensor, "B L"], group_ids: Int[Tensor, " B"]
) -> Bool[Tensor, " B"]:
    """True for each response of a group in which no response has an advantage other than 0."""
    per_response = advantages.flatten(1).ne(0).any(dim=1) if advantages.ndim > 1 else advantages.ne(0)
    ids, index = torch.unique(group_ids, return_inverse=True)
    active = torch.zeros(len(ids), dtype=torch.int64, device=index.device).index_add(0, index, per_response.long())
    return active[index] == 0


class _Groups(NamedTuple):
    """Rewards by group, N groups. In float64, in which a mean of float32 rewards is exact to their own precision."""

    rewards: Float[Tensor, " B"]  # 0 where not valid
    valid: Bool[Tensor, " B"]
    index: Int[Tensor, " B"]  # group of each response, 0 .. N-1
    sizes: Int[Tensor, " N"]  # number of valid rewards
    contrast: Bool[Tensor, " N"]  # whether two valid rewards differ

    @staticmethod
    def of(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], valid: Bool[Tensor, " B"] | None) -> _Groups:
        valid = torch.ones_like(group_ids, dtype=torch.bool) if valid is None else valid
        if rewards.ndim != 1 or not rewards.shape == group_ids.shape == valid.shape:
            raise ValueError(
                "rewards, group_ids and valid need one entry for each response, "
                f"got shapes {tuple(rewards.shape)}, {tuple(group_ids.shape)} and {tuple(valid.shape)}"
            )
        bad = (valid & ~rewards.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"the rewards of responses {bad[:10]} are not finite; mark responses without a reward in `valid`"
            )
        precise = torch.where(valid, rewards.detach().double(), 0.0)
        ids, index = torch.unique(group_ids, return_inverse=True)
        sizes = torch.zeros(len(ids), dtype=torch.int64, device=index.device).index_add(0, index, valid.long())
        empty = precise.new_zeros(len(ids))
        lowest = empty.scatter_reduce(0, index[valid], precise[valid], "amin", include_self=False)
        highest = empty.scatter_reduce(0, index[valid], precise[valid], "amax", include_self=False)
        return _Groups(precise, valid, index, sizes, contrast=highest > lowest)

    def sum(self, values: Float[Tensor, " B"]) -> Float[Tensor, " N"]:
        """Sum of the values of each group."""
        return values.new_zeros(len(self.sizes)).index_add(0, self.index, values)
