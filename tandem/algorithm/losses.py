"""Policy losses: the clipped surrogate of PPO and GRPO, and a wrapper for a user's own loss function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tandem.algorithm.kl import K3_BOUND, LOG_RATIO_BOUND, KlEstimator, check_estimator, token_kl
from tandem.algorithm.masked import Aggregation, check_aggregation, masked_sum, token_weights
from tandem.algorithm.protocols import Loss, LossFunction, LossOutput


class TokenLoss(NamedTuple):
    """Loss of each token, and how it came about. All but `loss` are without gradient."""

    loss: Float[Tensor, "*shape"]
    ratio: Float[Tensor, "*shape"]
    clipped: Bool[Tensor, "*shape"]  # at the clip range: no gradient
    dual_clipped: Bool[Tensor, "*shape"]  # at the dual clip: no gradient


def clipped_surrogate(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> TokenLoss:
    """The clipped policy-gradient loss of each token.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)   with ratio = exp(logprobs - old_logprobs)

    So a token stops counting once its ratio has moved out of the range in the direction that its advantage asks for;
    moved the other way, it keeps its gradient, -A * ratio. That has no bound where A < 0 and the ratio grows:
    `clip_dual` holds the loss at -A * clip_dual there.

    The log-ratio is clamped to [-20, 20], beyond which the gradient is 0, so that loss and gradient are always finite.
    Where the log-probs are equal the ratio is exactly 1.

    Args:
        logprobs: Under the policy, with gradient.
        old_logprobs: Under the policy that the ratio is taken to. No gradient flows into them.
        advantages: Of each token, or of each response as [B, 1].
        clip_low: How far the ratio may fall below 1, of tokens with A < 0.
        clip_high: How far it may rise above 1, of tokens with A > 0.
        clip_dual: Largest ratio of tokens with A < 0, more than 1. None = no bound.

    Source:
        PPO (arXiv:1707.06347), 3; lower and upper range: DAPO (arXiv:2503.14476), 3.1; dual clip: arXiv:1912.09729.
    """
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    bounded = torch.where(clipped, ratio.detach().clamp(low, high), ratio)
    if clip_dual is None:
        dual_clipped = torch.zeros_like(clipped)
    else:
        dual_clipped = (advantages < 0) & (ratio > clip_dual)
        bounded = torch.where(dual_clipped, clip_dual, bounded)
    return TokenLoss(-bounded * advantages, ratio.detach(), clipped, dual_clipped)


@dataclass(frozen=True)
class ClippedSurrogate:
    """The loss of GRPO: clipped surrogate + kl_coef * KL - entropy_coef * entropy, each token with its weight.

        ClippedSurrogate(0.2, 0.2)                                  plain
        ClippedSurrogate(0.2, 0.28)                                 a wider upper range
        ClippedSurrogate(aggregation="sequence_mean", kl_coef=0.04) as in the GRPO paper

    Args:
        clip_low, clip_high, clip_dual: See `clipped_surrogate`.
        aggregation: See `token_weights`.
        constant_length: Tokens that `aggregation="constant"` divides by.
        kl_coef: Weight of the KL to the reference. 0 = no reference is needed; if there is one, the KL is reported.
        kl_estimator: See `tandem.algorithm.kl`.
        entropy_coef: Weight of the entropy bonus, per nat.

    Raises:
        ValueError: A value out of its range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None
    aggregation: Aggregation = "token_mean"
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    constant_length: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low must be between 0 and 1, got {self.clip_low!r}")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high must be at least 0, got {self.clip_high!r}")
        if self.clip_dual is not None and not self.clip_dual > 1.0:
            raise ValueError(f"clip_dual must be more than 1, got {self.clip_dual!r}; None switches it off")
        if not self.kl_coef >= 0.0:
            raise ValueError(f"kl_coef must be at least 0, got {self.kl_coef!r}")
        check_estimator(self.kl_estimator)
        check_aggregation(self.aggregation, self.constant_length)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl_coef > 0.0

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy term."""
        return self.entropy_coef != 0.0

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
        _require("ref_logprobs", ref_logprobs, needed=self.needs_reference)
        _require("entropy", entropy, needed=self.needs_entropy)
        inside = _Inside.of(response_mask, logprobs, old_logprobs, advantages, ref_logprobs, entropy)
        surrogate = clipped_surrogate(
            inside.logprobs,
            inside.old_logprobs,
            inside.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            clip_dual=self.clip_dual,
        )
        token_losses = surrogate.loss
        metrics = _common_metrics(inside, self.kl_estimator)
        metrics["clip_fraction"] = surrogate.clipped.to(weights.dtype).sum()
        if self.clip_dual is not None:
            metrics["dual_clip_fraction"] = surrogate.dual_clipped.to(weights.dtype).sum()
        if self.needs_reference and inside.ref_logprobs is not None:
            kl = token_kl(inside.logprobs, inside.ref_logprobs.detach(), self.kl_estimator)
            token_losses = token_losses + self.kl_coef * kl
        if self.needs_entropy and inside.entropy is not None:
            token_losses = token_losses - self.entropy_coef * inside.entropy
        return LossOutput(
            loss=masked_sum(weights * token_losses, response_mask),
            num_tokens=response_mask.sum(),
            metrics=metrics,
            ratio=torch.where(response_mask, surrogate.ratio, 0.0),
        )


@dataclass(frozen=True)
class FunctionLoss:
    """A user's own loss function, with what the trainer must know about it.

    Args:
        function: See `LossFunction`.
        aggregation, constant_length: See `token_weights`; they make the weights that the function's losses get.
        needs_reference: Whether the function needs `ref_logprobs`.
        needs_entropy: Whether it needs `entropy`, with gradient.
        idle_without_advantage: Promise that a response of advantage 0 has no gradient: such responses are then not run.
    """

    function: LossFunction
    aggregation: Aggregation = "token_mean"
    constant_length: int | None = None
    needs_reference: bool = False
    needs_entropy: bool = False
    idle_without_advantage: bool = False

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.constant_length)

    def __call__(
        self,
        *,
        logprobs: Float[Tensor, "b L"],
        old_logprobs: Float[Tensor, "b L"],
        advantages: Float[Tensor, " b #L"],
        response_mask: Bool[Tensor, "b L"],
        weights: Float[Tensor, "b L"],
        ref_logprobs: Float[Tensor, "b L"] | None = None,
        entropy: Float[Tensor, "b L"] | None = None,
    ) -> LossOutput:
        """Call the function on what lies inside the mask, and sum up its token losses with the weights.

        Returns:
            As `ClippedSurrogate`, without the metrics that belong to clipping.

        Raises:
            ValueError: The function returned no tensor with a gradient, or neither one number nor a loss for each
                token.
        """
        _require("ref_logprobs", ref_logprobs, needed=self.needs_reference)
        _require("entropy", entropy, needed=self.needs_entropy)
        inside = _Inside.of(response_mask, logprobs, old_logprobs, advantages, ref_logprobs, entropy)
        result: object = self.function(
            logprobs=inside.logprobs,
            old_logprobs=inside.old_logprobs,
            ref_logprobs=inside.ref_logprobs,
            advantages=inside.advantages,
            response_mask=response_mask,
            weights=weights,
            entropy=inside.entropy,
        )
        if not isinstance(result, Tensor):
            raise ValueError(
                f"the loss function {self.function!r} must return a tensor, it returned a {type(result).__name__}"
            )
        if logprobs.requires_grad and not result.requires_grad:
            raise ValueError(
                f"the loss function {self.function!r} returned a tensor without a gradient: it must be computed from "
                "`logprobs`, not detached"
            )
        if result.shape not in (torch.Size(), response_mask.shape):
            raise ValueError(
                f"the loss function {self.function!r} must return one number or token losses of shape "
                f"{tuple(response_mask.shape)}, it returned shape {tuple(result.shape)}"
            )
        return LossOutput(
            loss=result if result.ndim == 0 else masked_sum(weights * result, response_mask),
            num_tokens=response_mask.sum(),
            metrics=_common_metrics(inside, "k3"),
            ratio=torch.where(response_mask, inside.ratio, 0.0),
        )


def as_loss(loss: Loss | LossFunction) -> Loss:
    """The loss itself, or a plain function as a `FunctionLoss` with token-mean weights."""
    return loss if isinstance(loss, Loss) else FunctionLoss(loss)


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
    correction: Float[Tensor, "B L"] | None = None,
) -> Float[Tensor, ""]:
    """The GRPO loss of a whole batch, for a PyTorch loop of your own.

    Args:
        logprobs: Of the response tokens under the policy, with gradient.
        old_logprobs: Under the policy that wrote them; `logprobs.detach()` if that is the same one.
        advantages: Of each response, or of each token.
        response_mask: True on the tokens that enter the loss. What stands elsewhere has no effect.
        clip_low, clip_high, clip_dual: See `clipped_surrogate`.
        aggregation, constant_length: See `token_weights`.
        ref_logprobs: Under the reference; needed where `kl_coef` is not 0.
        kl_coef, kl_estimator: Weight and kind of the KL term.
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
    )
    weights = token_weights(aggregation, response_mask, constant=constant_length, dtype=logprobs.dtype)
    return loss(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages[:, None] if advantages.ndim == 1 else advantages,
        response_mask=response_mask,
        weights=weights if correction is None else torch.where(response_mask, weights * correction.detach(), 0.0),
        ref_logprobs=ref_logprobs,
    ).loss


class _Inside(NamedTuple):
    """The matrices of a micro-batch with zeros outside of the mask, where NaN and infinities may stand."""

    logprobs: Float[Tensor, "b L"]
    old_logprobs: Float[Tensor, "b L"]
    advantages: Float[Tensor, "b L"]
    ref_logprobs: Float[Tensor, "b L"] | None
    entropy: Float[Tensor, "b L"] | None
    mask: Bool[Tensor, "b L"]

    @staticmethod
    def of(
        mask: Bool[Tensor, "b L"],
        logprobs: Float[Tensor, "b L"],
        old_logprobs: Float[Tensor, "b L"],
        advantages: Float[Tensor, " b #L"],
        ref_logprobs: Float[Tensor, "b L"] | None,
        entropy: Float[Tensor, "b L"] | None,
    ) -> _Inside:
        return _Inside(
            logprobs=torch.where(mask, logprobs, 0.0),
            old_logprobs=torch.where(mask, old_logprobs, 0.0),
            advantages=torch.where(mask, advantages, 0.0),
            ref_logprobs=None if ref_logprobs is None else torch.where(mask, ref_logprobs, 0.0),
            entropy=None if entropy is None else torch.where(mask, entropy, 0.0),
            mask=mask,
        )

    @property
    def log_ratio(self) -> Float[Tensor, "b L"]:
        difference = self.logprobs.detach() - self.old_logprobs.detach()
        return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @property
    def ratio(self) -> Float[Tensor, "b L"]:
        return self.log_ratio.exp()


def _common_metrics(inside: _Inside, kl_estimator: KlEstimator) -> dict[str, Float[Tensor, ""]]:
    """Sums over the tokens in the loss of what every loss can report."""
    metrics = {
        "ratio_mean": masked_sum(inside.ratio, inside.mask),
        "approx_kl": masked_sum(-inside.log_ratio, inside.mask),
    }
    if inside.ref_logprobs is not None:
        kl = token_kl(inside.logprobs.detach(), inside.ref_logprobs.detach(), kl_estimator)
        metrics["kl"] = masked_sum(kl, inside.mask)
        if kl_estimator == "k3":
            metrics["kl_clamped"] = (kl >= K3_BOUND).to(kl.dtype).sum()
    if inside.entropy is not None:
        metrics["entropy"] = masked_sum(inside.entropy.detach(), inside.mask)
    return metrics


def _require(name: str, value: Tensor | None, *, needed: bool) -> None:
    if needed and value is None:
        raise ValueError(f"this loss needs {name}, which was not given")
