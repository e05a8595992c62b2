"""Correction of the loss for tokens that were drawn from another distribution than the old policy's.

The engine samples from mu, the trainer's loss is an expectation under the old policy pi: the two differ where they
compute in low precision or with different kernels, and where the responses were written by an older policy. Importance
sampling makes up for it: a token's policy-gradient loss gets the weight pi / mu. A ratio may be huge, so it is bounded:

                 above the range                     outside of the range
    one token    token_tis: cut to its upper end     token_mask: 0
    a response   sequence_tis: likewise              sequence_mask: 0, the response is rejected

The ratio of a response is the product over its tokens, exp of the SUM of their log-ratios: unbiased, with a variance
that grows with the length. That of a token leaves out how the text before it came about: biased, but tame.

A ratio is a chain: with the trainer's own log-probs under the weights that sampled ("sampling"),

    old / rollout  =  sampling / rollout  *  old / sampling
                      engine mismatch        staleness

Source:
    Truncated importance sampling: F. Yao et al., Your efficient RL framework secretly brings you off-policy RL training
    (https://fengyao.notion.site/off-policy-rl, 2025); token_mask: IcePop, in Every Step Evolves (arXiv:2510.18855);
    by sequence: J. Liu, Y. Li et al., When speed kills stability (2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tandem.algorithm.kl import LOG_RATIO_BOUND

CorrectionKind = Literal["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask"]
CORRECTIONS: tuple[CorrectionKind, ...] = get_args(CorrectionKind)


def importance_ratio(
    old_logprobs: Float[Tensor, "B L"],
    rollout_logprobs: Float[Tensor, "B L"],
    response_mask: Bool[Tensor, "B L"],
    *,
    by_sequence: bool = False,
) -> Float[Tensor, "B L"]:
    """Probability of each token under the old policy over the one that it was drawn with; no gradient.

    Args:
        old_logprobs: Under the policy that the loss is an expectation of, computed by the trainer.
        rollout_logprobs: Under the distribution that the tokens were drawn from, as the engine says.
        response_mask: True on the tokens that enter the loss. What stands elsewhere, NaN included, has no effect.
        by_sequence: Each token gets the ratio of its whole response.

    Returns:
        1 outside of the mask (the ratio of the response where `by_sequence`). Log-ratios are clamped to [-20, 20].
    """
    log_ratio = torch.where(response_mask, old_logprobs.detach() - rollout_logprobs.detach(), 0.0).double()
    if by_sequence:
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().to(old_logprobs.dtype)


@dataclass(frozen=True)
class Correction:
    """What the policy-gradient loss of a token is multiplied by, to make up for how it was drawn.

        weights = Correction("token_tis", high=2.0)(old_logprobs, rollout_logprobs, response_mask)

    No denominator changes: a token of weight 0 counts in it, as all that were drawn do. So the weights need nothing but
    their own row, and it does not matter how a mini-batch is cut or spread.

    Args:
        kind: See the table at the top of this file; "none" gives every token the weight 1.
        low: Lower end of the range; for masks. Truncation acts above only.
        high: Upper end of the range.

    Raises:
        ValueError: An unknown kind, a range without 1 in it, or a lower end that truncation would ignore.
    """

    kind: CorrectionKind = "none"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        check_correction(self.kind)
        if not (0.0 <= self.low <= 1.0 <= self.high and self.low < self.high):
            raise ValueError(f"the range of a correction must have 1 in it, got [{self.low!r}, {self.high!r}]")
        if self.truncates and self.low != 0.0:
            raise ValueError(f"{self.kind} acts above its range only, so low must be 0, got {self.low!r}")

    @property
    def is_on(self) -> bool:
        """False for "none"."""
        return self.kind != "none"

    @property
    def by_sequence(self) -> bool:
        """Whether a response has one ratio."""
        return self.kind in ("sequence_tis", "sequence_mask")

    @property
    def truncates(self) -> bool:
        """Whether what lies above the range is cut to its end, not to 0."""
        return self.kind in ("token_tis", "sequence_tis")

    def ratio(
        self,
        old_logprobs: Float[Tensor, "B L"],
        rollout_logprobs: Float[Tensor, "B L"],
        response_mask: Bool[Tensor, "B L"],
    ) -> Float[Tensor, "B L"]:
        """`importance_ratio`, of tokens or of responses as the kind wants it."""
        return importance_ratio(old_logprobs, rollout_logprobs, response_mask, by_sequence=self.by_sequence)

    def outside(self, ratio: Float[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
        """True where a ratio lies outside of the range: it is bounded, or would be."""
        return (ratio < self.low) | (ratio > self.high)

    def __call__(
        self,
        old_logprobs: Float[Tensor, "B L"],
        rollout_logprobs: Float[Tensor, "B L"],
        response_mask: Bool[Tensor, "B L"],
    ) -> Float[Tensor, "B L"]:
        """The weights: no gradient, 0 outside of the mask; see `importance_ratio` for the arguments."""
        if not self.is_on:
            return response_mask.to(old_logprobs.dtype)
        ratio = self.ratio(old_logprobs, rollout_logprobs, response_mask)
        bounded = ratio.clamp(max=self.high) if self.truncates else torch.where(self.outside(ratio), 0.0, ratio)
        return torch.where(response_mask, bounded, 0.0)


def check_correction(kind: str) -> None:
    """Raise ValueError unless `Correction` knows this kind."""
    if kind not in CORRECTIONS:
        raise ValueError(f"unknown correction {kind!r}; choose one of {', '.join(CORRECTIONS)}")
