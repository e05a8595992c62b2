"""What an advantage function and a loss look like, for those who bring their own.

Both are called with keywords only, and get those that they name. For a type checker a function ends in `**_`, which
takes the rest:

    def loss(*, logprobs, advantages, response_mask, **_):
        return -advantages * logprobs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tandem.algorithm.masked import Aggregation


@runtime_checkable
class AdvantageFunction(Protocol):
    """Says how much better each response, or each of its tokens, is than expected."""

    def __call__(
        self,
        *,
        rewards: Float[Tensor, " B"],
        valid: Bool[Tensor, " B"],
        group_ids: Int[Tensor, " B"],
        response_mask: Bool[Tensor, "B L"],
        components: Mapping[str, Float[Tensor, " B"]],
        baselines: Float[Tensor, " B"] | None,
        values: Float[Tensor, "B L"] | None,
    ) -> Float[Tensor, " B"] | Float[Tensor, "B L"]:
        """Advantages per response [B] or per token [B, L], finite wherever `valid`. Larger is better.

        Args:
            rewards: Reward of each response, less its KL penalty where `kl_place=reward`; 0 where it is not `valid`.
            valid: False where a response has no reward or no token in the loss. Its advantage is set to 0.
            group_ids: Which prompt each response answers.
            response_mask: True on the tokens of valid responses that enter the loss.
            components: What else the reward function returned: name -> one number for each response, NaN where a
                response has none.
            baselines: Reward of the greedy response to each one's prompt, NaN where that has none. None unless
                `algorithm.advantage` is remax.
            values: The critic's for the state in which each token was chosen, 0 outside of `response_mask`. None unless
                `algorithm.advantage` is gae.
        """
        ...


@runtime_checkable
class LossFunction(Protocol):
    """Computes the loss of one micro-batch."""

    def __call__(
        self,
        *,
        logprobs: Float[Tensor, "b L"],
        old_logprobs: Float[Tensor, "b L"],
        ref_logprobs: Float[Tensor, "b L"] | None,
        advantages: Float[Tensor, "b L"],
        response_mask: Bool[Tensor, "b L"],
        weights: Float[Tensor, "b L"],
        entropy: Float[Tensor, "b L"] | None,
    ) -> Float[Tensor, "b L"] | Float[Tensor, ""]:
        """Token losses [b, L], which are then summed with `weights`; or one number, used as it is.

        One number must have the denominators of the whole mini-batch, as `(weights * token_losses).sum()` has: the
        numbers of the micro-batches are added up, not averaged. Every matrix is 0 outside of `response_mask`.

        Args:
            logprobs: Of the response tokens under the policy, with gradient, at the sampling temperature.
            old_logprobs: Under the policy that the step began with.
            ref_logprobs: Under the reference; None where there is none.
            advantages: Of each token.
            response_mask: True on the tokens that enter the loss.
            weights: Each token's share in the loss of the whole mini-batch: `token_weights`, times the weight that
                makes up for how the token was drawn, where there is a `Correction`.
            entropy: Of the distribution that each token was drawn from, in nats; None where it was not computed.
        """
        ...


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch, and what there is to report about it.

    Micro-batches add up: the sum of their `loss` is the loss of the mini-batch, and the sum of a metric over the sum of
    `num_tokens` is its mean over all tokens.
    """

    loss: Float[Tensor, ""]  # to call backward() on; its denominators are those of the whole mini-batch
    num_tokens: Int[Tensor, ""]  # tokens in the loss
    metrics: Mapping[str, Float[Tensor, ""]]  # name of a mean over tokens -> its sum over these tokens, no gradient
    ratio: Float[Tensor, "b L"]  # policy over old policy, no gradient, 0 outside of the mask


@runtime_checkable
class Loss(Protocol):
    """What the trainer works with: `ClippedSurrogate`, or `FunctionLoss` around a `LossFunction`."""

    @property
    def aggregation(self) -> Aggregation:
        """How token losses become one loss: the first argument of `token_weights`."""
        ...

    @property
    def constant_length(self) -> int | None:
        """The `constant` of `token_weights`."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether `ref_logprobs` must be given."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """Whether `entropy` must be given, with gradient. Without, it is only reported."""
        ...

    @property
    def idle_without_advantage(self) -> bool:
        """Whether a response of advantage 0 surely has no gradient, so that it need not be run."""
        ...

    def __call__(
        self,
        *,
        logprobs: Float[Tensor, "b L"],
        old_logprobs: Float[Tensor, "b L"],
        advantages: Float[Tensor, " b #L"],
        response_mask: Bool[Tensor, "b L"],
        weights: Float[Tensor, "b L"],
        correction: Float[Tensor, "b L"] | None = None,
        ref_logprobs: Float[Tensor, "b L"] | None = None,
        entropy: Float[Tensor, "b L"] | None = None,
    ) -> LossOutput:
        """The loss of one micro-batch. Whatever stands outside of `response_mask`, NaN included, has no effect.

        Args:
            logprobs: Of the response tokens under the policy, with gradient, at the sampling temperature.
            old_logprobs: Under the policy that the step began with.
            advantages: Of each token, or of each response as [b, 1].
            response_mask: True on the tokens that enter the loss.
            weights: Each token's share in the loss of the whole mini-batch, see `token_weights`.
            correction: What makes up for how each token was drawn, see `Correction`: a factor of its policy-gradient
                loss, without gradient. None = all 1.
            ref_logprobs: Under the reference; None where there is none.
            entropy: Of the distribution that each token was drawn from, in nats; None where it was not computed.
        """
        ...
