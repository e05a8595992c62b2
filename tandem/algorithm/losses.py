"""The loss of the update: a clipped surrogate with its KL and entropy terms, each token with its weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tandem.algorithm.function_loss import FunctionLoss
from tandem.algorithm.kl import KlEstimator, check_estimator, token_kl
from tandem.algorithm.loss_inputs import LossInputs
from tandem.algorithm.masked import Aggregation, check_aggregation, masked_sum, token_weights
from tandem.algorithm.protocols import Loss, LossFunction, LossOutput
from tandem.algorithm.surrogates import SURROGATES, SurrogateName, TokenLoss, check_surrogate, dual_clip


@dataclass(frozen=True)
class ClippedSurrogate:
    """The loss of GRPO and its kin: surrogate + kl_coef * KL - entropy_coef * entropy, each token with its weight.

        ClippedSurrogate(0.2, 0.2)                                                      plain
        ClippedSurrogate(0.2, 0.28)                                                     a wider upper range
        ClippedSurrogate(aggregation="sequence_mean", kl_coef=0.04)                     as in the GRPO paper
        ClippedSurrogate(3e-4, 4e-4, surrogate="gspo", aggregation="sequence_mean")     as in the GSPO paper

    Args:
        clip_low, clip_high: How far below and above 1 the range of the ratio goes; see `tandem.algorithm.surrogates`.
        clip_dual: Largest ratio where the advantage is negative, for `ppo_clip`; see `clipped_surrogate`.
        aggregation: See `token_weights`.
        constant_length: Tokens that `aggregation="constant"` divides by.
        kl_coef: Weight of the KL to the reference. 0 = no reference is needed; if there is one, the KL is reported.
        kl_estimator: See `tandem.algorithm.kl`.
        entropy_coef: Weight of the entropy bonus, per nat.
        surrogate: ppo_clip, gspo or cispo: what is clipped, see `tandem.algorithm.surrogates`.

    Raises:
        ValueError: A value out of its range, an unknown name, or a dual clip where there is none.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None
    aggregation: Aggregation = "token_mean"
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    constant_length: int | None = None
    surrogate: SurrogateName = "ppo_clip"

    def __post_init__(self) -> None:
        check_surrogate(self.surrogate)
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low must be between 0 and 1, got {self.clip_low!r}")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high must be at least 0, got {self.clip_high!r}")
        if self.clip_dual is not None and not self.clip_dual > 1.0:
            raise ValueError(f"clip_dual must be more than 1, got {self.clip_dual!r}; None switches it off")
        if self.clip_dual is not None and self.surrogate != "ppo_clip":
            raise ValueError(f"clip_dual is for the surrogate ppo_clip, not for {self.surrogate}: leave it at None")
        for name, coef in (("kl_coef", self.kl_coef), ("entropy_coef", self.entropy_coef)):
            if not 0.0 <= coef < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {coef!r}")
        check_estimator(self.kl_estimator)
        check_aggregation(self.aggregation, self.constant_length)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl_coef > 0.0

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy term."""
        return self.entropy_coef > 0.0

    @property
    def idle_without_advantage(self) -> bool:
        """Whether a response of advantage 0 has no gradient: neither of the two terms above."""
        return not (self.needs_reference or self.needs_entropy)

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
        """The loss of one micro-batch, with the weights of its tokens in the whole mini-batch.

        Returns:
            Loss, ratio, and the sums for the means `ratio_mean`, `approx_kl` (policy from old policy), `clip_fraction`;
            where they apply also `dual_clip_fraction`, `kl`, `kl_clamped` (share of tokens at k3's bound), `entropy`.

        Raises:
            ValueError: The loss has a term for which `ref_logprobs` or `entropy` is missing.
        """
        inputs = LossInputs.inside(
            response_mask,
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            advantages=advantages,
            ref_logprobs=ref_logprobs,
            entropy=entropy,
            correction=correction,
        )
        inputs.require(reference=self.needs_reference, entropy=self.needs_entropy)
        token = self._policy_gradient(inputs)
        token_losses = token.loss if inputs.correction is None else token.loss * inputs.correction
        if self.needs_reference and inputs.ref_logprobs is not None:
            token_losses = token_losses + self.kl_coef * token_kl(
                inputs.logprobs, inputs.ref_logprobs, self.kl_estimator
            )
        if self.needs_entropy and inputs.entropy is not None:
            token_losses = token_losses - self.entropy_coef * inputs.entropy
        metrics = inputs.metrics(token.ratio, self.kl_estimator)
        metrics["clip_fraction"] = token.clipped.to(weights.dtype).sum()
        if self.clip_dual is not None:
            metrics["dual_clip_fraction"] = token.dual_clipped.to(weights.dtype).sum()
        return LossOutput(
            loss=masked_sum(weights * token_losses, response_mask),
            num_tokens=response_mask.sum(),
            metrics=metrics,
            ratio=torch.where(response_mask, token.ratio, 0.0),
        )

    def _policy_gradient(self, inputs: LossInputs) -> TokenLoss:
        token = SURROGATES[self.surrogate](
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.advantages,
            inputs.mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        return token if self.clip_dual is None else dual_clip(token, inputs.advantages, self.clip_dual)


def as_loss(loss: Loss | LossFunction, like: Loss) -> Loss:
    """The loss itself, or a plain function as a `FunctionLoss` with the aggregation of `like`."""
    if isinstance(loss, Loss) and not isinstance(loss, type):  # a class has all that its objects have
        return loss
    return FunctionLoss(loss, aggregation=like.aggregation, constant_length=like.constant_length)


def grpo_loss(
    logprobs: Float[Tensor, "B L"],
    old_logprobs: Float[Tensor, "B L"],
    advantages: Float[Tensor, " B"] | Float[Tensor, " B #L"],
    response_mask: Bool[Tensor, "B L"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
    aggregation: Aggregation = "token_mean",
    constant_length: int | None = None,
    ref_logprobs: Float[Tensor, "B L"] | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    surrogate: SurrogateName = "ppo_clip",
    correction: Float[Tensor, "B L"] | None = None,
) -> Float[Tensor, ""]:
    """The GRPO loss of a whole batch, for a PyTorch loop of your own.

    Args:
        logprobs: Of the response tokens under the policy, with gradient.
        old_logprobs: Under the policy that wrote them; `logprobs.detach()` if that is the same one.
        advantages: Of each response, or of each token.
        response_mask: True on the tokens that enter the loss. What stands elsewhere has no effect.
        clip_low, clip_high, clip_dual: See `ClippedSurrogate`.
        aggregation, constant_length: See `token_weights`.
        ref_logprobs: Under the reference; needed where `kl_coef` is not 0.
        kl_coef, kl_estimator: Weight and kind of the KL term.
        surrogate: See `ClippedSurrogate`.
        correction: Weights that make up for how the tokens were drawn, as `Correction` computes them. None = all 1.

    Raises:
        ValueError: A value out of its range, or no `ref_logprobs` for the KL term.
    """
    loss = ClippedSurrogate(
        clip_low=clip_low,
        clip_high=clip_high,
        clip_dual=clip_dual,
        aggregation=aggregation,
        constant_length=constant_length,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        surrogate=surrogate,
    )
    weights = token_weights(aggregation, response_mask, constant=constant_length, dtype=logprobs.dtype)
    return loss(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages[:, None] if advantages.ndim == 1 else advantages,
        response_mask=response_mask,
        weights=weights,
        correction=correction,
        ref_logprobs=ref_logprobs,
    ).loss
