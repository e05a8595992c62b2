"""What an update reports: sums over micro-batches and ranks, and the values of each row."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from tandem.algorithm.protocols import LossOutput
from tandem.batch import Rollouts, UpdateResult
from tandem.model.ranks import Ranks

_NAMED = frozenset({"kl", "entropy", "ratio_mean", "clip_fraction"})  # fields of UpdateResult


@dataclass(frozen=True)
class _Sums:
    """Of one micro-batch, or of several: for means over all tokens that were run."""

    num_tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    ratio_max: float = 0.0
    engine_gap: float = 0.0  # between the log-probs of trainer and engine
    engine_gap_max: float = 0.0
    engine_gap_tokens: int = 0

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(
            num_tokens=self.num_tokens + other.num_tokens,
            metrics={
                name: self.metrics.get(name, 0.0) + other.metrics.get(name, 0.0)
                for name in {**self.metrics, **other.metrics}
            },
            ratio_max=max(self.ratio_max, other.ratio_max),
            engine_gap=self.engine_gap + other.engine_gap,
            engine_gap_max=max(self.engine_gap_max, other.engine_gap_max),
            engine_gap_tokens=self.engine_gap_tokens + other.engine_gap_tokens,
        )


class Tally:
    """Collects on each rank what it ran; the result is that of all ranks together, and the same on each.

    Args:
        rollouts: What the update is made from.
        ranks: They run its rows.
        device: Where their collectives work.
    """

    def __init__(self, rollouts: Rollouts, ranks: Ranks, device: torch.device) -> None:
        self.rollouts = rollouts
        self.ranks = ranks
        self.device = device
        self.sums = _Sums()
        self.logprobs_and_ratio = torch.zeros(2, *rollouts.response_tokens.shape)  # 0 in rows of other ranks
        self.was_run = torch.zeros(len(rollouts), dtype=torch.bool)  # on any rank
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.taken = 0
        self.skipped = 0

    def begin_mini_batch(self, rows: Sequence[int]) -> None:
        """These rows are run anew, perhaps on other ranks than before."""
        self.was_run[list(rows)] = True
        self.logprobs_and_ratio[:, list(rows)] = 0.0

    def add_micro_batch(self, rows: Sequence[int], output: LossOutput, logprobs: Float[Tensor, "b L"]) -> None:
        """What this rank computed for rows of its own."""
        index = list(rows)
        logprobs = logprobs.detach().cpu()
        self.logprobs_and_ratio[0, index] = logprobs
        self.logprobs_and_ratio[1, index] = output.ratio.cpu()
        mask = self.rollouts.response_mask[index]
        gap = torch.where(mask, logprobs - self.rollouts.rollout_logprobs[index], 0.0).abs()
        first = self.taken == 0  # until the first update the weights are those that the engine sampled with
        self.sums = self.sums.plus(
            _Sums(
                num_tokens=int(output.num_tokens),
                metrics={name: float(value) for name, value in output.metrics.items()},
                ratio_max=float(output.ratio.max()),
                engine_gap=float(gap.double().sum()) if first else 0.0,
                engine_gap_max=float(gap.max()) if first else 0.0,
                engine_gap_tokens=int(mask.sum()) if first else 0,
            )
        )

    def add_update(self, loss: float, grad_norm: float, *, taken: bool) -> None:
        """What all ranks know of a mini-batch."""
        self.taken += taken
        self.skipped += not taken
        if taken:
            self.losses.append(loss)
            self.norms.append(grad_norm)

    def result(self, lr: float, policy_version: int) -> UpdateResult:
        """Everything together. Every rank must call it."""
        sums = functools.reduce(_Sums.plus, self.ranks.gather(self.sums))
        values = self.ranks.sum(self.logprobs_and_ratio.to(self.device)).cpu()
        logprobs, ratio = torch.where(self.was_run[:, None], values, float("nan"))
        means = {name: value / max(sums.num_tokens, 1) for name, value in sums.metrics.items()}
        extra = {name: value for name, value in means.items() if name not in _NAMED}
        if sums.engine_gap_tokens:
            extra["rollout/logprob_diff_mean"] = sums.engine_gap / sums.engine_gap_tokens
            extra["rollout/logprob_diff_max"] = sums.engine_gap_max
        return UpdateResult(
            loss=_mean(self.losses),
            kl=means.get("kl"),
            entropy=means.get("entropy"),
            ratio_mean=means.get("ratio_mean", 1.0),
            ratio_max=sums.ratio_max if sums.num_tokens else 1.0,
            clip_fraction=means.get("clip_fraction", 0.0),
            grad_norm=_mean(self.norms),
            lr=lr,
            num_updates=self.taken,
            num_skipped=self.skipped,
            policy_version=policy_version if self.taken else policy_version - 1,
            logprobs=logprobs,
            ratio=ratio,
            metrics=extra,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
