"""Step 5 of the loop: ascend the clipped objective, mini-batch by mini-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tandem.algorithm.masked import token_weights
from tandem.algorithm.protocols import Loss
from tandem.batch import Rollouts, UpdateResult
from tandem.trainer.logprobs import batch_logprobs
from tandem.trainer.mini_batches import Shuffle, mini_batches
from tandem.trainer.optim import Optimizer
from tandem.trainer.packing import PackingOptions
from tandem.trainer.policy import Policy


@dataclass(frozen=True)
class UpdateOptions:
    """How one step's rollouts become optimizer updates: see the config's `trainer` section."""

    packing: PackingOptions = field(default_factory=PackingOptions)
    mini_batch_responses: int | None = None
    shuffle: Shuffle = "groups"
    epochs: int = 1
    skip_idle: bool = True  # do not run rows whose tokens have no gradient; tests switch it off to compare


@dataclass(frozen=True)
class UpdateBatch:
    """All that an update is computed from. `loss_mask` may leave out whole responses; they are in no denominator."""

    rollouts: Rollouts
    advantages: Float[Tensor, " B #L"]
    loss_mask: Bool[Tensor, "B L"]
    old_logprobs: Float[Tensor, "B L"] | None  # None: those of the policy as it is when the update begins
    ref_logprobs: Float[Tensor, "B L"] | None


def update_policy(
    policy: Policy,
    optimizer: Optimizer,
    batch: UpdateBatch,
    loss: Loss,
    options: UpdateOptions,
    *,
    lr: float,
    seed: tuple[int, ...],
    policy_version: int,
) -> UpdateResult:
    """Run all mini-batches of a step. Gradients add up over micro-batches; denominators are the mini-batch's.

    A mini-batch in which no row can have a gradient makes no optimizer step: momentum alone must not move the weights.

    Args:
        policy, optimizer: What is updated.
        batch: Rollouts with advantages and log-probs.
        loss: Called once for each micro-batch.
        options: How the rollouts are cut.
        lr: Learning rate of this step.
        seed: Of the mini-batches' order.
        policy_version: Number that the new weights get, if at least one update was taken.

    Raises:
        TrainingError: Too many updates in a row were not finite.
    """
    if batch.old_logprobs is None and not _is_one_update(batch, options):
        batch = replace(batch, old_logprobs=batch_logprobs(policy, batch.rollouts, options.packing))
    tally = _Tally(batch.rollouts)
    order = mini_batches(
        batch.rollouts,
        size=options.mini_batch_responses,
        shuffle=options.shuffle,
        epochs=options.epochs,
        seed=seed,
    )
    with optimizer.weights.collecting():
        for rows in order:
            active = _active_rows(batch, rows, loss) if options.skip_idle else rows
            if active:
                value = _backward(policy, batch, rows, active, loss, options.packing, tally)
                outcome = optimizer.step(lr, loss_is_finite=bool(torch.isfinite(value)))
                tally.add_update(float(value), outcome.grad_norm, taken=outcome.taken)
    return tally.result(lr, policy_version)


def _is_one_update(batch: UpdateBatch, options: UpdateOptions) -> bool:
    """Then its own log-probs, detached, are the old ones: no extra pass, and every ratio is exactly 1."""
    num_responses = len(batch.rollouts)
    return options.epochs == 1 and (options.mini_batch_responses or num_responses) >= num_responses


def _active_rows(batch: UpdateBatch, rows: Sequence[int], loss: Loss) -> list[int]:
    """Rows that may have a gradient. An idle one still counts in the denominators."""
    has_token = batch.loss_mask.any(dim=1)
    has_signal = batch.advantages.ne(0).any(dim=1)
    return [row for row in rows if bool(has_token[row]) and (bool(has_signal[row]) or not loss.idle_without_advantage)]


def _backward(
    policy: Policy,
    batch: UpdateBatch,
    rows: Sequence[int],
    active: Sequence[int],
    loss: Loss,
    packing: PackingOptions,
    tally: _Tally,
) -> Float[Tensor, ""]:
    """Add up the gradients of one mini-batch and return its loss."""
    weights = torch.zeros(batch.loss_mask.shape, dtype=torch.float32)
    weights[list(rows)] = token_weights(
        loss.aggregation, batch.loss_mask[list(rows)], constant=loss.constant_length
    )  # before cutting: the denominators are those of the whole mini-batch, idle rows included
    total = torch.zeros((), dtype=torch.float64)
    for part, row in policy.packed(batch.rollouts, active, packing):
        logprobs, entropy = (
            row.to_matrix(values)
            for values in policy(row, temperature=batch.rollouts.temperature, entropy_gradient=loss.needs_entropy)
        )
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[part].to(policy.device)
        output = loss(
            logprobs=logprobs,
            old_logprobs=old,
            ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[part].to(policy.device),
            advantages=batch.advantages[part].to(policy.device),
            response_mask=batch.loss_mask[part].to(policy.device),
            weights=weights[part].to(policy.device),
            entropy=entropy,
        )
        output.loss.backward()
        total += output.loss.detach().double().cpu()
        tally.add_micro_batch(part, output.num_tokens, output.metrics, output.ratio, logprobs.detach())
    return total


class _Tally:
    """Sums over micro-batches, for means over all tokens that were run."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.sums: dict[str, float] = {}
        self.num_tokens = 0
        self.ratio = torch.full(rollouts.response_tokens.shape, float("nan"))  # NaN: a row that was not run
        self.logprobs = torch.full(rollouts.response_tokens.shape, float("nan"))
        self.ratio_max = 0.0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.taken = 0
        self.skipped = 0
        self.engine_gap_sum = 0.0
        self.engine_gap_max = 0.0
        self.engine_gap_tokens = 0

    def add_micro_batch(
        self, rows: Sequence[int], num_tokens: Tensor, sums: Mapping[str, Tensor], ratio: Tensor, logprobs: Tensor
    ) -> None:
        index = list(rows)
        self.num_tokens += int(num_tokens)
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        self.ratio_max = max(self.ratio_max, float(ratio.max()))
        self.ratio[index] = ratio.cpu()
        self.logprobs[index] = logprobs.cpu()
        if self.taken == 0:  # until the first update the weights are those that the engine sampled with
            mask = self.rollouts.response_mask[index]
            gap = torch.where(mask, logprobs.cpu() - self.rollouts.rollout_logprobs[index], 0.0).abs()
            self.engine_gap_sum += float(gap.double().sum())
            self.engine_gap_max = max(self.engine_gap_max, float(gap.max()))
            self.engine_gap_tokens += int(mask.sum())

    def add_update(self, loss: float, grad_norm: float, *, taken: bool) -> None:
        self.taken += taken
        self.skipped += not taken
        if taken:
            self.losses.append(loss)
            self.norms.append(grad_norm)

    def result(self, lr: float, policy_version: int) -> UpdateResult:
        means = {name: value / max(self.num_tokens, 1) for name, value in self.sums.items()}
        extra = {name: value for name, value in means.items() if name not in _NAMED}
        if self.engine_gap_tokens:
            extra["rollout/logprob_diff_mean"] = self.engine_gap_sum / self.engine_gap_tokens
            extra["rollout/logprob_diff_max"] = self.engine_gap_max
        return UpdateResult(
            loss=_mean(self.losses),
            kl=means.get("kl"),
            entropy=means.get("entropy"),
            ratio_mean=means.get("ratio_mean", 1.0),
            ratio_max=self.ratio_max if self.num_tokens else 1.0,
            clip_fraction=means.get("clip_fraction", 0.0),
            grad_norm=_mean(self.norms),
            lr=lr,
            num_updates=self.taken,
            num_skipped=self.skipped,
            policy_version=policy_version if self.taken else policy_version - 1,
            logprobs=self.logprobs,
            ratio=self.ratio,
            metrics=extra,
        )


_NAMED = frozenset({"kl", "entropy", "ratio_mean", "clip_fraction"})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
