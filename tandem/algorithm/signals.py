"""What an estimator of advantages sees of one step, without all that must have no effect."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tandem.algorithm.groups import valid_rewards
from tandem.algorithm.kl import token_kl
from tandem.algorithm.masked import masked_sum
from tandem.algorithm.token_advantages import token_rewards
from tandem.batch import Rewards, Rollouts
from tandem.config.algorithm import AlgorithmConfig


class Signals:
    """Rewards, and what they may be compared with: matrices of tokens are made for those estimators that ask for them.

    A response takes part if it has a reward and a token in the loss.

    Args:
        config: The section `algorithm`.
        rewards, rollouts: Of one step.
        old_logprobs, ref_logprobs: For a KL penalty in the reward.
        values: The critic's, where there is one.

    Raises:
        ValueError: A valid reward is not finite; something that is asked for is missing, has a wrong shape or is not
            finite where it counts.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        rewards: Rewards,
        rollouts: Rollouts,
        *,
        old_logprobs: Float[Tensor, "B L"] | None,
        ref_logprobs: Float[Tensor, "B L"] | None,
        values: Float[Tensor, "B L"] | None,
    ) -> None:
        in_loss = rollouts.loss_mask(mask_truncated=config.mask_truncated)
        self.group_ids: Int[Tensor, " B"] = rollouts.group_ids
        self.valid: Bool[Tensor, " B"] = rewards.valid & in_loss.any(dim=1)  # which responses take part
        self.mask: Bool[Tensor, "B L"] = in_loss & self.valid[:, None]  # their tokens in the loss
        self._outcomes = valid_rewards(rewards.values, self.valid)
        self._penalty = _kl_penalty(config, self.mask, old_logprobs, ref_logprobs)
        self._baselines = rewards.baselines
        self._values = values

    @property
    def rewards(self) -> Float[Tensor, " B"]:
        """Of responses, less the KL penalty of all their tokens. float64, 0 where not valid."""
        return self._outcomes if self._penalty is None else self._outcomes - masked_sum(self._penalty, self.mask, dim=1)

    @property
    def token_rewards(self) -> Float[Tensor, "B L"]:
        """The same where they fall due."""
        return token_rewards(self._outcomes, self.mask, self._penalty)

    @property
    def values(self) -> Float[Tensor, "B L"]:
        """The critic's, float64; what stands outside of the mask has no meaning."""
        return _needed("values", self._values, self.mask, "gae")

    @property
    def baselines(self) -> Float[Tensor, " B"]:
        """Rewards of greedy responses, NaN where there is none."""
        if self._baselines is None:
            raise ValueError(
                "algorithm.advantage=remax needs `rewards.baselines`, the reward of the greedy response to each "
                "prompt: `collect` has it where the config names this advantage"
            )
        return self._baselines


def _kl_penalty(
    config: AlgorithmConfig, mask: Bool[Tensor, "B L"], old_logprobs: Tensor | None, ref_logprobs: Tensor | None
) -> Float[Tensor, "B L"] | None:
    if not config.kl_in_reward:
        return None
    reason = f"algorithm.kl_place=reward with algorithm.kl_coef={config.kl_coef:g}"
    old_logprobs = _needed("old_logprobs", old_logprobs, mask, reason)
    ref_logprobs = _needed("ref_logprobs", ref_logprobs, mask, reason)
    return config.kl_coef * token_kl(old_logprobs, ref_logprobs, config.kl_estimator)


_REMEDIES = {
    "old_logprobs": "pass trainer.old_logprobs(rollouts), or where that is None rollouts.rollout_logprobs; started "
    "with algorithm.old_logprobs=recompute, the trainer computes them",
    "ref_logprobs": "pass trainer.ref_logprobs(rollouts)",
    "values": "pass trainer.values(rollouts)",
}


_SUSPECTS = {
    "old_logprobs": "the weights may have diverged",
    "ref_logprobs": "the reference (algorithm.reference, where it is set) may hold weights that are not finite",
    "values": "the critic's weights may have diverged (lower critic.lr), or those of critic.path are not finite",
}


def _needed(name: str, given: Tensor | None, mask: Bool[Tensor, "B L"], reason: str) -> Float[Tensor, "B L"]:
    """`given` in float64 and without gradient; ValueError unless it is there, fits and is finite in the mask."""
    if given is None:
        raise ValueError(f"{reason} needs `{name}`: {_REMEDIES[name]}")
    if given.shape != mask.shape:
        raise ValueError(
            f"`{name}` must have shape {tuple(mask.shape)}, one entry for each token, not {tuple(given.shape)}"
        )
    if bool((mask & ~given.isfinite()).any()):
        raise ValueError(f"{reason}: `{name}` are not finite on some tokens in the loss; {_SUSPECTS[name]}")
    return given.detach().double()
