"""Surrogates: the policy-gradient loss of each token, and how far its ratio may take it.

With r_t = exp(logprobs - old_logprobs) of token t and s = exp(mean of logprobs - old_logprobs over its response):

    name        loss of a token                                     what is clipped
    ppo_clip    -min(r_t * A, clip(r_t) * A)                        the ratio of each token: no gradient beyond
    gspo        -min(s * A, clip(s) * A)                            the ratio of a response: none of it has one beyond
    cispo       -clip(r_t) * A * logprobs, clip(r_t) a constant     the weight of each token, which keeps a gradient

All log-ratios are clamped to [-20, 20], so that loss and gradient are always finite. Where the log-probs are equal
every ratio is exactly 1, and the three have the same gradient, -A. Each needs nothing but its own row, so it does not
matter how a mini-batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tandem.algorithm.kl import LOG_RATIO_BOUND
from tandem.algorithm.masked import masked_mean

SurrogateName = Literal["ppo_clip", "gspo", "cispo"]


class TokenLoss(NamedTuple):
    """Loss of each token, and how it came about. All but `loss` are without gradient."""

    loss: Float[Tensor, "*shape"]
    ratio: Float[Tensor, "*shape"]
    clipped: Bool[Tensor, "*shape"]  # the clip range acts
    dual_clipped: Bool[Tensor, "*shape"]  # at the dual clip: no gradient


class Surrogate(Protocol):
    """One of the three, of a micro-batch with zeros outside of the mask."""

    def __call__(
        self,
        logprobs: Float[Tensor, "b L"],
        old_logprobs: Float[Tensor, "b L"],
        advantages: Float[Tensor, "b L"],
        response_mask: Bool[Tensor, "b L"],
        /,
        *,
        clip_low: float,
        clip_high: float,
    ) -> TokenLoss:
        """The clip range is [1 - clip_low, 1 + clip_high]. Gradients flow through `logprobs` only."""
        ...


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
    token = _clipped(logprobs - old_logprobs.detach(), advantages, clip_low, clip_high)
    return token if clip_dual is None else dual_clip(token, advantages, clip_dual)


def dual_clip(token: TokenLoss, advantages: Float[Tensor, "*#shape"], bound: float) -> TokenLoss:
    """Hold the loss of tokens with A < 0 at -A * bound where their ratio is above `bound`; without gradient there."""
    beyond = (advantages < 0) & (token.ratio > bound)
    return token._replace(loss=torch.where(beyond, -bound * advantages, token.loss), dual_clipped=beyond)


def gspo(
    logprobs: Float[Tensor, "b L"],
    old_logprobs: Float[Tensor, "b L"],
    advantages: Float[Tensor, "b L"],
    response_mask: Bool[Tensor, "b L"],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The clipped surrogate with one ratio for a response: the geometric mean over its tokens in the mask.

    s = exp(mean over t of (logprobs_t - old_logprobs_t)),   s_t = sg(s) * exp(logprobs_t - sg(logprobs_t)),
    loss_t = -min(s_t * A_t, clip(s_t) * A_t)                with sg = without gradient

    s_t has the value of s and the gradient of its own token, s * grad logprobs_t (GSPO-token). With the same advantage
    on all tokens and `sequence_mean`, the mean over them is the gradient of the loss of the response, -A * grad s.
    A mean of log-ratios is small: the paper clips at 3e-4 and 4e-4.

    Source:
        GSPO (arXiv:2507.18071), 4.1; 4.3 (GSPO-token).
    """
    of_response = masked_mean(logprobs.detach() - old_logprobs.detach(), response_mask, dim=1)
    return _clipped(logprobs - logprobs.detach() + of_response[:, None], advantages, clip_low, clip_high)


def cispo(
    logprobs: Float[Tensor, "b L"],
    old_logprobs: Float[Tensor, "b L"],
    advantages: Float[Tensor, "b L"],
    response_mask: Bool[Tensor, "b L"],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """REINFORCE with a clipped importance weight, so that every token keeps a gradient.

    loss = -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprobs   with sg = without gradient

    `clipped` are the tokens whose weight is not the ratio, whatever the sign of their advantage. clip_low = 1 is no
    lower bound, the paper's choice.

    Source:
        MiniMax-M1 (arXiv:2506.13585), 3.1.
    """
    ratio = _ratio(logprobs.detach() - old_logprobs.detach())
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = weight != ratio
    return TokenLoss(-weight * advantages * logprobs, ratio, clipped, torch.zeros_like(clipped))


SURROGATES: Mapping[str, Surrogate] = {
    "ppo_clip": lambda logprobs, old_logprobs, advantages, _, *, clip_low, clip_high: clipped_surrogate(
        logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high
    ),
    "gspo": gspo,
    "cispo": cispo,
}


def check_surrogate(name: str) -> None:
    """Raise ValueError unless there is a surrogate of this name."""
    if name not in SURROGATES:
        raise ValueError(f"unknown surrogate {name!r}; choose one of {', '.join(SURROGATES)}")


def _clipped(
    log_ratio: Float[Tensor, "*shape"], advantages: Float[Tensor, "*#shape"], clip_low: float, clip_high: float
) -> TokenLoss:
    """-min(ratio * A, clip(ratio) * A), with the gradient of `log_ratio` where the clip does not act."""
    ratio = _ratio(log_ratio)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    bounded = torch.where(clipped, ratio.detach().clamp(low, high), ratio)
    return TokenLoss(-bounded * advantages, ratio.detach(), clipped, torch.zeros_like(clipped))


def _ratio(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
