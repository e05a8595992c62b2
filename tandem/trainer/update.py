"""Step 5 of the loop: ascend the clipped objective, mini-batch by mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tandem.algorithm.masked import token_weights
from tandem.algorithm.protocols import Loss
from tandem.batch import UpdateResult
from tandem.model.ranks import ALONE, Ranks
from tandem.trainer.logprobs import batch_logprobs
from tandem.trainer.mini_batches import Shuffle, mini_batches
from tandem.trainer.optim import Optimizer
from tandem.trainer.packing import PackingOptions
from tandem.trainer.policy import Policy
from tandem.trainer.steps import Steps
from tandem.trainer.tally import Tally
from tandem.trainer.update_batch import UpdateBatch


@dataclass(frozen=True)
class UpdateOptions:
    """How one step's rollouts become optimizer updates: see the config's `trainer` section."""

    packing: PackingOptions = field(default_factory=PackingOptions)
    mini_batch_responses: int | None = None
    shuffle: Shuffle = "groups"
    epochs: int = 1
    skip_idle: bool = True  # do not run rows whose tokens have no gradient; tests switch it off to compare


def update_policy(
    policy: Policy,
    optimizer: Optimizer,
    batch: UpdateBatch,
    loss: Loss,
    options: UpdateOptions,
    ranks: Ranks = ALONE,
    *,
    lr: float,
    seed: tuple[int, ...],
    policy_version: int,
) -> UpdateResult:
    """Run all mini-batches of a step. Gradients add up over micro-batches; denominators are the mini-batch's.

    Each of several ranks runs some of the rows. All are called with the same arguments and return the same, that of
    one rank: the weights sum the gradients up over ranks, and this function what it reports.

    A mini-batch in which no row can have a gradient makes no optimizer step: momentum alone must not move the weights.

    Args:
        policy, optimizer: What is updated.
        batch: Rollouts with advantages and log-probs.
        loss: Called once for each micro-batch that has rows.
        options: How the rollouts are cut.
        ranks: Those that make the update together.
        lr: Learning rate of this step.
        seed: Of the mini-batches' order.
        policy_version: Number that the new weights get, if at least one update was taken.

    Raises:
        TrainingError: Too many updates in a row were not finite.
    """
    if batch.old_logprobs is None and not _is_one_update(batch, options):
        batch = replace(batch, old_logprobs=batch_logprobs(policy, batch.rollouts, options.packing, ranks))
    steps = Steps(optimizer, lr)
    tally = Tally(batch, ranks, policy.device, policy_version, steps)
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
                tally.begin_mini_batch(active)
                part = _backward(policy, batch, rows, active, loss, options.packing, ranks, tally)
                steps.take(float(ranks.sum(part)))
    return tally.result()


def _is_one_update(batch: UpdateBatch, options: UpdateOptions) -> bool:
    """Then its own log-probs, detached, are the old ones: no extra pass, and every ratio is exactly 1."""
    num_responses = len(batch.rollouts)
    return options.epochs == 1 and (options.mini_batch_responses or num_responses) >= num_responses


def _active_rows(batch: UpdateBatch, rows: Sequence[int], loss: Loss) -> list[int]:
    """Rows that may have a gradient. An idle one still counts in the denominators."""
    tokens = batch.loss_mask & batch.advantages.ne(0) if loss.idle_without_advantage else batch.loss_mask
    is_active = tokens.any(dim=1)
    return [row for row in rows if bool(is_active[row])]


def _backward(
    policy: Policy,
    batch: UpdateBatch,
    rows: Sequence[int],
    active: Sequence[int],
    loss: Loss,
    packing: PackingOptions,
    ranks: Ranks,
    tally: Tally,
) -> Float[Tensor, ""]:
    """Add up the gradients of this rank's rows of one mini-batch and return their part of its loss."""
    weights = torch.zeros(batch.loss_mask.shape, dtype=torch.float32)
    weights[list(rows)] = token_weights(
        loss.aggregation, batch.loss_mask[list(rows)], constant=loss.constant_length
    )  # before cutting: the denominators are those of the whole mini-batch, idle rows included
    total = torch.zeros((), dtype=torch.float64, device=policy.device)
    for part, row in policy.packed(batch.rollouts, active, packing, ranks):
        logprobs, entropy = (
            row.to_matrix(values)
            for values in policy(row, temperature=batch.rollouts.temperature, entropy_gradient=loss.needs_entropy)
        )
        if not part:  # other ranks have more micro-batches, and take this one to add up their gradients
            logprobs.sum().backward()
            continue
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[part].to(policy.device)
        mask = batch.loss_mask[part].to(policy.device)
        output = loss(
            logprobs=logprobs,
            old_logprobs=old,
            ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[part].to(policy.device),
            advantages=batch.advantages[part].to(policy.device),
            response_mask=mask,
            weights=weights[part].to(policy.device),
            correction=batch.correction(old, batch.rollouts.rollout_logprobs[part].to(policy.device), mask),
            entropy=entropy,
        )
        # From the log-probs as well, with nothing: other ranks wait for this one's gradients, whatever a loss returns.
        torch.autograd.backward([output.loss, logprobs], [None, torch.zeros_like(logprobs)])
        total += output.loss.detach().double()
        tally.add_micro_batch(part, output, logprobs, old)
    return total
