"""What an update reports: sums over micro-batches and ranks, and the values of each row."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from tandem.algorithm.mismatch import Mismatch
from tandem.algorithm.protocols import LossOutput
from tandem.batch import UpdateResult
from tandem.model.ranks import Ranks
from tandem.trainer.steps import Steps
from tandem.trainer.update_batch import UpdateBatch

_NAMED = frozenset({"kl", "entropy", "ratio_mean", "clip_fraction"})  # fields of UpdateResult


@dataclass(frozen=True)
class _Sums:
    """Of one micro-batch, or of several: for means over all tokens that were run."""

    num_tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    ratio_max: float = 0.0
    mismatch: Mismatch = field(default_factory=Mismatch)

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(
            num_tokens=self.num_tokens + other.num_tokens,
            metrics={
                name: self.metrics.get(name, 0.0) + other.metrics.get(name, 0.0)
                for name in {**self.metrics, **other.metrics}
            },
            ratio_max=max(self.ratio_max, other.ratio_max),
            mismatch=self.mismatch.plus(other.mismatch),
        )


class Tally:
    """Collects on each rank what it ran; the result is that of all ranks together, and the same on each.

    Args:
        batch: What the update is made from.
        ranks: They run its rows.
        device: Where their collectives work.
        policy_version: Number that the new weights get, if there are any.
        steps: The update's, which all ranks take together.
    """

    def __init__(
        self, batch: UpdateBatch, ranks: Ranks, device: torch.device, policy_version: int, steps: Steps
    ) -> None:
        rollouts = batch.rollouts
        self.batch = batch
        self.ranks = ranks
        self.device = device
        self.policy_version = policy_version
        self.steps = steps
        self.sums = _Sums()
        self.logprobs_and_ratio = torch.zeros(2, *rollouts.response_tokens.shape)  # 0 in rows of other ranks
        self.was_run = torch.zeros(len(rollouts), dtype=torch.bool)  # on any rank

    def begin_mini_batch(self, rows: Sequence[int]) -> None:
        """These rows are run anew, perhaps on other ranks than before."""
        self.was_run[list(rows)] = True
        self.logprobs_and_ratio[:, list(rows)] = 0.0

    def add_micro_batch(
        self,
        rows: Sequence[int],
        output: LossOutput,
        logprobs: Float[Tensor, "b L"],
        old_logprobs: Float[Tensor, "b L"],
    ) -> None:
        """What this rank computed for rows of its own."""
        index = list(rows)
        logprobs = logprobs.detach().cpu()
        self.logprobs_and_ratio[0, index] = logprobs
        self.logprobs_and_ratio[1, index] = output.ratio.cpu()
        self.sums = self.sums.plus(
            _Sums(
                num_tokens=int(output.num_tokens),
                metrics={name: float(value) for name, value in output.metrics.items()},
                ratio_max=float(output.ratio.max()),
                mismatch=self._mismatch(index, logprobs, old_logprobs.cpu()),
            )
        )

    def _mismatch(
        self, rows: list[int], logprobs: Float[Tensor, "b L"], old_logprobs: Float[Tensor, "b L"]
    ) -> Mismatch:
        """Between engine and trainer, with the weights that sampled; of no token where there is no telling."""
        batch, stale = self.batch, None
        if batch.rollouts.cut_logprobs:
            return Mismatch()
        if batch.sampling_logprobs is not None:
            sampling, stale = batch.sampling_logprobs[rows], old_logprobs
        elif batch.rollouts.policy_version + 1 != self.policy_version:
            return Mismatch()
        elif self.steps.num_taken == 0:  # until the first update the weights are those that sampled
            sampling = logprobs
        elif batch.correction.is_on:  # needs old log-probs that are the trainer's own
            sampling = old_logprobs
        else:
            return Mismatch()
        return Mismatch.between(
            sampling,
            batch.rollouts.rollout_logprobs[rows],
            batch.loss_mask[rows],
            old_logprobs=stale,
            correction=batch.correction,
        )

    def result(self) -> UpdateResult:
        """Everything together. Every rank must call it."""
        sums = functools.reduce(_Sums.plus, self.ranks.gather(self.sums))
        values = self.ranks.sum(self.logprobs_and_ratio.to(self.device)).cpu()
        logprobs, ratio = torch.where(self.was_run[:, None], values, float("nan"))
        means = {name: value / max(sums.num_tokens, 1) for name, value in sums.metrics.items()}
        extra = {name: value for name, value in means.items() if name not in _NAMED}
        return UpdateResult(
            loss=self.steps.loss,
            kl=means.get("kl"),
            entropy=means.get("entropy"),
            ratio_mean=means.get("ratio_mean", 1.0),
            ratio_max=sums.ratio_max if sums.num_tokens else 1.0,
            clip_fraction=means.get("clip_fraction", 0.0),
            grad_norm=self.steps.grad_norm,
            lr=self.steps.lr,
            num_updates=self.steps.num_taken,
            num_skipped=self.steps.num_skipped,
            policy_version=self.policy_version if self.steps.num_taken else self.policy_version - 1,
            logprobs=logprobs,
            ratio=ratio,
            metrics=extra | sums.mismatch.metrics(),
        )
