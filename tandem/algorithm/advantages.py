"""Advantages of one step's responses: the estimator that the config names, or the user's own function."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tandem.algorithm.group_advantages import (
    grpo_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from tandem.algorithm.own_function import call_function, check_function
from tandem.algorithm.protocols import AdvantageFunction
from tandem.algorithm.signals import Signals
from tandem.algorithm.token_advantages import (
    gae,
    gae_advantages,
    reinforce_plus_plus_advantages,
    remax_advantages,
)
from tandem.batch import Rewards, Rollouts
from tandem.config.algorithm import AlgorithmConfig
from tandem.errors import FunctionError

ADVANTAGES: Mapping[str, Callable[[AlgorithmConfig, Signals], Tensor]] = {
    "grpo": lambda config, signals: grpo_advantages(
        signals.rewards, signals.group_ids, valid=signals.valid, normalize_std=config.normalize_std
    ),
    "dr_grpo": lambda _, signals: grpo_advantages(signals.rewards, signals.group_ids, valid=signals.valid),
    "rloo": lambda _, signals: rloo_advantages(signals.rewards, signals.group_ids, valid=signals.valid),
    "reinforce_plus_plus": lambda config, signals: reinforce_plus_plus_advantages(
        signals.token_rewards, signals.mask, gamma=config.gamma
    ),
    "reinforce_plus_plus_baseline": lambda _, signals: reinforce_plus_plus_baseline_advantages(
        signals.rewards, signals.group_ids, signals.mask, valid=signals.valid
    ),
    "remax": lambda _, signals: remax_advantages(signals.token_rewards, signals.mask, signals.baselines),
    "gae": lambda config, signals: gae_advantages(
        signals.token_rewards, signals.values, signals.mask, gamma=config.gamma, lam=config.lam
    ),
}
"""`algorithm.advantage` -> what computes it."""


def estimate_advantages(
    config: AlgorithmConfig,
    rewards: Rewards,
    rollouts: Rollouts,
    old_logprobs: Float[Tensor, "B L"] | None = None,
    ref_logprobs: Float[Tensor, "B L"] | None = None,
    values: Float[Tensor, "B L"] | None = None,
    *,
    function: AdvantageFunction | None = None,
) -> Float[Tensor, " B"] | Float[Tensor, "B L"]:
    """The advantages of one step's responses, by `algorithm.advantage` or by the user's own function.

    A response takes part if it has a reward and a token in the loss: what cannot be learned from must not move the mean
    of its group, or of the step. The others get 0. With `kl_place=reward` each token pays kl_coef times the estimate of
    KL(policy || reference) out of its reward; estimators that look at whole responses see the sum.

    Args:
        config: The section `algorithm`: `advantage` and its options, `mask_truncated`, `kl_place` and the KL's.
        rewards: One for each response.
        rollouts: The responses.
        old_logprobs: Of the policy before the step; with `kl_place=reward`.
        ref_logprobs: Of the reference; likewise.
        values: The critic's, of each token; with `advantage=gae`, and for `function` if there are any.
        function: Computes the advantages instead.

    Returns:
        Of each response; of each token where estimator or `function` says so. float32, no gradient.

    Raises:
        ValueError: A valid reward is not finite; something that the config asks for is missing or does not fit;
            `function` cannot be called, or returned no tensor, a wrong shape or something not finite (FunctionError).
    """
    signals = Signals(config, rewards, rollouts, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, values=values)
    if function is None:
        return ADVANTAGES[config.advantage](config, signals)
    return _own_advantages(function, signals, rewards, None if values is None else signals.values)


def estimate_returns(
    config: AlgorithmConfig,
    rewards: Rewards,
    rollouts: Rollouts,
    old_logprobs: Float[Tensor, "B L"] | None = None,
    ref_logprobs: Float[Tensor, "B L"] | None = None,
    values: Float[Tensor, "B L"] | None = None,
) -> Float[Tensor, "B L"]:
    """What a critic learns in this step, whatever the advantage: the returns of `gae`, which needs `values`.

    Arguments and errors as of `estimate_advantages`.

    Returns:
        Of each token; float32, no gradient, 0 outside of the response mask. NaN in a response that takes no part: what
        the critic should expect there is not known.
    """
    signals = Signals(config, rewards, rollouts, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, values=values)
    _, returns = gae(signals.token_rewards, signals.values, signals.mask, gamma=config.gamma, lam=config.lam)
    returns = torch.where(signals.mask, returns, torch.nan)
    return torch.where(rollouts.response_mask, returns, 0.0).float()


def idle_groups(advantages: Float[Tensor, "B L"], group_ids: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """True for each response of a group in which no token has an advantage other than 0."""
    per_response = advantages.ne(0).any(dim=1)
    ids, index = torch.unique(group_ids, return_inverse=True)
    active = torch.zeros(len(ids), dtype=torch.int64, device=index.device).index_add(0, index, per_response.long())
    return active[index] == 0


def _own_advantages(
    function: AdvantageFunction, signals: Signals, rewards: Rewards, values: Float[Tensor, "B L"] | None
) -> Float[Tensor, " B"] | Float[Tensor, "B L"]:
    """What the user's function returns, checked, and 0 where it must have no effect."""
    valid, mask = signals.valid, signals.mask
    # Copies: what a function does to them in place must not change the rollouts.
    given = {
        "rewards": signals.rewards.to(rewards.values.dtype),
        "valid": valid.clone(),
        "group_ids": signals.group_ids.clone(),
        "response_mask": mask.clone(),
        "components": {name: component.clone() for name, component in rewards.components.items()},
        "baselines": None if rewards.baselines is None else rewards.baselines.clone(),
        "values": None if values is None else torch.where(mask, values, 0.0).float(),
    }
    check_function("advantage", function, AdvantageFunction)
    advantages = call_function("advantage", function, given)
    if not isinstance(advantages, Tensor):
        raise FunctionError(
            f"the advantage function {function!r} must return a tensor, it returned a {type(advantages).__name__}",
            remedy="return a tensor of the shape of `rewards` or of `response_mask`",
        )
    if advantages.shape not in (valid.shape, mask.shape):
        raise FunctionError(
            f"the advantage function {function!r} must return shape {tuple(valid.shape)} or {tuple(mask.shape)}, "
            f"it returned {tuple(advantages.shape)}",
            remedy="return one number for each response, or for each of its tokens",
        )
    used = valid if advantages.ndim == 1 else mask
    advantages = torch.where(used, advantages.detach().float(), 0.0)
    if not bool(advantages.isfinite().all()):
        raise FunctionError(
            f"the advantage function {function!r} returned a value that is not finite",
            remedy="look for a division by 0 or by a spread of 0; `valid` says which responses have a reward",
        )
    return advantages
