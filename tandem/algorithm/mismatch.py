"""How far the engine that samples and the trainer are apart, on the tokens that were sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tandem.algorithm.correction import Correction
from tandem.algorithm.kl import LOG_RATIO_BOUND


@dataclass(frozen=True)
class Mismatch:
    """Sums and largest values over some tokens: those of micro-batches and ranks add up."""

    num_tokens: int = 0
    kl: float = 0.0
    difference: float = 0.0
    difference_max: float = 0.0
    ratio_max: float = 0.0
    num_outside: int = 0
    staleness_kl: float = 0.0

    @staticmethod
    def between(
        sampling_logprobs: Float[Tensor, "b L"],
        rollout_logprobs: Float[Tensor, "b L"],
        response_mask: Bool[Tensor, "b L"],
        *,
        old_logprobs: Float[Tensor, "b L"] | None = None,
        correction: Correction | None = None,
    ) -> Mismatch:
        """Compare two computations of the same log-probs.

        Args:
            sampling_logprobs: The trainer's, under the weights that sampled.
            rollout_logprobs: The engine's.
            response_mask: True on the tokens that count.
            old_logprobs: Under the old policy, where that may be a newer one: the staleness is measured to it.
            correction: Whose range says what is outside.
        """
        difference = (sampling_logprobs.detach() - rollout_logprobs.detach())[response_mask].double()
        if not difference.numel():
            return Mismatch()
        correction = Correction() if correction is None else correction
        ratio = correction.ratio(sampling_logprobs, rollout_logprobs, response_mask)
        stale = None if old_logprobs is None else (old_logprobs.detach() - sampling_logprobs.detach())[response_mask]
        return Mismatch(
            num_tokens=difference.numel(),
            kl=_kl_sum(difference),
            difference=float(difference.abs().sum()),
            difference_max=float(difference.abs().max()),
            ratio_max=float(difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).max().exp()),
            num_outside=int(correction.outside(ratio)[response_mask].sum()),
            staleness_kl=0.0 if stale is None else _kl_sum(stale.double()),
        )

    def plus(self, other: Mismatch) -> Mismatch:
        """Of both together."""
        return Mismatch(
            num_tokens=self.num_tokens + other.num_tokens,
            kl=self.kl + other.kl,
            difference=self.difference + other.difference,
            difference_max=max(self.difference_max, other.difference_max),
            ratio_max=max(self.ratio_max, other.ratio_max),
            num_outside=self.num_outside + other.num_outside,
            staleness_kl=self.staleness_kl + other.staleness_kl,
        )

    def metrics(self) -> dict[str, float]:
        """By the names of `metrics.jsonl`; none where no token was compared."""
        if not self.num_tokens:
            return {}
        return {
            "mismatch/kl": self.kl / self.num_tokens,
            "mismatch/logprob_diff_mean": self.difference / self.num_tokens,
            "mismatch/logprob_diff_max": self.difference_max,
            "mismatch/ratio_max": self.ratio_max,
            "mismatch/share_outside": self.num_outside / self.num_tokens,
            "mismatch/staleness_kl": self.staleness_kl / self.num_tokens,
        }


def _kl_sum(log_ratio: Float[Tensor, " N"]) -> float:
    """Sum of exp(d) - 1 - d, the k3 estimate of KL(distribution that was drawn from || other): never negative."""
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return float((torch.expm1(bounded) - bounded).sum())
