"""What an estimator of advantages sees of one step, without all that must have no effect."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tandem.algorithm.groups import valid_rewards
from tandem.algorithm.kl import token_kl
from tandem.algorithm.masked import masked_sum
from tandem.algorithm.token_advantages import token_rewards
from tandem.batch import Rewards, Rollouts
from tandem.config.algorithm import AlgorithmConfig


class Signals(NamedTuple):
    """Rewards, and what they may be compared with. A response takes part if it has a reward and a token in the loss."""

    rewards: Float[Tensor, " B"]  # of responses, less the KL penalty of all their tokens; float64, 0 where not valid
    token_rewards: Float[Tensor, "B L"]  # the same where they fall due
    group_ids: Int[Tensor, " B"]
    valid: Bool[Tensor, " B"]  # which responses take part
    mask: Bool[Tensor, "B L"]  # their tokens in the loss
    baselines: Float[Tensor, " B"]  # NaN where there is none
    values: Float[Tensor, "B L"]  # 0 where there is no critic

    @staticmethod
    def of(
        config: AlgorithmConfig,
        rewards: Rewards,
        rollouts: Rollouts,
        *,
        old_logprobs: Float[Tensor, "B L"] | None,
        ref_logprobs: Float[Tensor, "B L"] | None,
        values: Float[Tensor, "B L"] | None,
    ) -> Signals:
        """Those of one step, from what flows through the loop.

        Raises:
            ValueError: A valid reward is not finite; something that the config asks for is missing, has a wrong shape
                or is not finite where it counts.
        """
        mask = rollouts.loss_mask(mask_truncated=config.mask_truncated)
        valid = rewards.valid & mask.any(dim=1)
        mask = mask & valid[:, None]
        penalty = torch.zeros(mask.shape, dtype=torch.float64)
        if config.kl_coef > 0 and config.kl_place == "reward":
            reason = f"algorithm.kl_place=reward with algorithm.kl_coef={config.kl_coef:g}"
            old_logprobs = _needed("old_logprobs", old_logprobs, mask, reason)
            ref_logprobs = _needed("ref_logprobs", ref_logprobs, mask, reason)
            penalty = config.kl_coef * token_kl(old_logprobs, ref_logprobs, config.kl_estimator)
        outcomes = valid_rewards(rewards.values, valid)
        return Signals(
            rewards=outcomes - masked_sum(penalty, mask, dim=1),
            token_rewards=token_rewards(outcomes, mask, penalty),
            group_ids=rollouts.group_ids,
            valid=valid,
            mask=mask,
            baselines=_baselines(config, rewards),
            values=_needed("values", values, mask, "algorithm.advantage=gae")
            if config.advantage == "gae"
            else torch.zeros_like(penalty),
        )


def _needed(name: str, given: Tensor | None, mask: Bool[Tensor, "B L"], reason: str) -> Float[Tensor, "B L"]:
    """`given` in float64 and without gradient; ValueError unless it is there, fits and is finite in the mask."""
    if given is None:
        raise ValueError(f"{reason} needs `{name}`: pass trainer.{name}(rollouts)")
    if given.shape != mask.shape:
        raise ValueError(
            f"`{name}` must have shape {tuple(mask.shape)}, one entry for each token, not {tuple(given.shape)}"
        )
    if bool((mask & ~given.isfinite()).any()):
        raise ValueError(f"{reason}: `{name}` are not finite on some tokens in the loss; the weights may have diverged")
    return given.detach().double()


def _baselines(config: AlgorithmConfig, rewards: Rewards) -> Float[Tensor, " B"]:
    if rewards.baselines is not None:
        return rewards.baselines
    if config.advantage == "remax":
        raise ValueError(
            "algorithm.advantage=remax needs `rewards.baselines`, the reward of the greedy response to each prompt: "
            "`collect` has it where the config names this advantage"
        )
    return torch.full_like(rewards.values, torch.nan)
