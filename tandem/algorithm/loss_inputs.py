"""What a loss works on: the matrices of one micro-batch, made safe to compute with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tandem.algorithm.kl import K3_BOUND, LOG_RATIO_BOUND, KlEstimator, token_kl
from tandem.algorithm.masked import masked_sum


class LossInputs(NamedTuple):
    """The matrices of a micro-batch with zeros outside of the mask, where NaN and infinities may stand."""

    logprobs: Float[Tensor, "b L"]
    old_logprobs: Float[Tensor, "b L"]
    advantages: Float[Tensor, "b L"]
    ref_logprobs: Float[Tensor, "b L"] | None
    entropy: Float[Tensor, "b L"] | None
    correction: Float[Tensor, "b L"] | None
    mask: Bool[Tensor, "b L"]

    @staticmethod
    def inside(
        mask: Bool[Tensor, "b L"],
        *,
        logprobs: Float[Tensor, "b L"],
        old_logprobs: Float[Tensor, "b L"],
        advantages: Float[Tensor, " b #L"],
        ref_logprobs: Float[Tensor, "b L"] | None,
        entropy: Float[Tensor, "b L"] | None,
        correction: Float[Tensor, "b L"] | None,
    ) -> LossInputs:
        """What stands inside of the mask. Gradients flow into log-probs and entropy only."""
        return LossInputs(
            logprobs=torch.where(mask, logprobs, 0.0),
            old_logprobs=torch.where(mask, old_logprobs.detach(), 0.0),
            advantages=torch.where(mask, advantages, 0.0),
            ref_logprobs=None if ref_logprobs is None else torch.where(mask, ref_logprobs.detach(), 0.0),
            entropy=None if entropy is None else torch.where(mask, entropy, 0.0),
            correction=None if correction is None else torch.where(mask, correction.detach(), 0.0),
            mask=mask,
        )

    def require(self, *, reference: bool, entropy: bool) -> None:
        """Raise ValueError where a matrix that the loss needs was not given."""
        for name, value, needed in (
            ("ref_logprobs", self.ref_logprobs, reference),
            ("entropy", self.entropy, entropy),
        ):
            if needed and value is None:
                raise ValueError(f"this loss needs {name}, which was not given")

    @property
    def ratio(self) -> Float[Tensor, "b L"]:
        """Of each token, policy over old policy, without gradient."""
        return self._log_ratio.exp()

    @property
    def _log_ratio(self) -> Float[Tensor, "b L"]:
        return (self.logprobs.detach() - self.old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def metrics(self, ratio: Float[Tensor, "b L"], kl_estimator: KlEstimator = "k3") -> dict[str, Float[Tensor, ""]]:
        """Sums over the tokens in the loss of what every loss can report; `ratio` is the one it works with."""
        metrics = {
            "ratio_mean": masked_sum(ratio, self.mask),
            "approx_kl": masked_sum(-self._log_ratio, self.mask),
        }
        if self.ref_logprobs is not None:
            kl = token_kl(self.logprobs.detach(), self.ref_logprobs, kl_estimator)
            metrics["kl"] = masked_sum(kl, self.mask)
            if kl_estimator == "k3":
                metrics["kl_clamped"] = (kl >= K3_BOUND).to(kl.dtype).sum()
        if self.entropy is not None:
            metrics["entropy"] = masked_sum(self.entropy.detach(), self.mask)
        return metrics
