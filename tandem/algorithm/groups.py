"""The responses to one prompt form a group: what the advantages know about it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tandem.batch import with_contrast


class Groups(NamedTuple):
    """Rewards by group, N groups. In float64, in which a mean of float32 rewards is exact to their own precision."""

    rewards: Float[Tensor, " B"]  # 0 where not valid
    valid: Bool[Tensor, " B"]
    index: Int[Tensor, " B"]  # group of each response, 0 .. N-1
    sizes: Int[Tensor, " N"]  # number of valid rewards
    contrast: Bool[Tensor, " N"]  # whether two valid rewards differ

    @staticmethod
    def of(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], valid: Bool[Tensor, " B"] | None) -> Groups:
        """Sort rewards by the group that they belong to. `valid` = None: all of them count.

        Raises:
            ValueError: A valid reward is not finite, or the arguments do not fit together.
        """
        valid = torch.ones_like(group_ids, dtype=torch.bool) if valid is None else valid
        if rewards.ndim != 1 or not rewards.shape == group_ids.shape == valid.shape:
            raise ValueError(
                "rewards, group_ids and valid need one entry for each response, "
                f"got shapes {tuple(rewards.shape)}, {tuple(group_ids.shape)} and {tuple(valid.shape)}"
            )
        precise = valid_rewards(rewards, valid)
        ids, index = torch.unique(group_ids, return_inverse=True)
        sizes = torch.zeros(len(ids), dtype=torch.int64, device=index.device).index_add(0, index, valid.long())
        return Groups(precise, valid, index, sizes, with_contrast(precise, valid, index, len(ids)))

    def sum(self, values: Float[Tensor, " B"]) -> Float[Tensor, " N"]:
        """Sum of the values of each group."""
        return values.new_zeros(len(self.sizes)).index_add(0, self.index, values)

    def centred(self) -> Float[Tensor, " B"]:
        """Each reward minus the mean of its group; exactly 0 where not valid, and in a group without contrast.

        Rewards that are equal differ from their mean in the last bit, which a small standard deviation would blow up.
        """
        centred = self.rewards - (self.sum(self.rewards) / self.sizes.clamp(min=1))[self.index]
        return torch.where(self.contrast[self.index] & self.valid, centred, 0.0)


def valid_rewards(rewards: Float[Tensor, " B"], valid: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Rewards in float64, without gradient, 0 where not valid.

    Raises:
        ValueError: A valid reward is not finite.
    """
    bad = (valid & ~rewards.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"the rewards of responses {bad[:10]} are not finite; mark responses without a reward in `valid`"
        )
    return torch.where(valid, rewards.detach().double(), 0.0)
