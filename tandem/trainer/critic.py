"""The critic: values of response tokens, and their update towards returns, mini-batch by mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from tandem.algorithm.masked import token_weights
from tandem.algorithm.value_loss import clipped_value_loss, explained_variance
from tandem.batch import CriticUpdate, Rollouts
from tandem.model.forward import head_values
from tandem.model.ranks import ALONE, Ranks
from tandem.trainer.mini_batches import mini_batches
from tandem.trainer.optim import Optimizer
from tandem.trainer.packed_model import PackedModel
from tandem.trainer.packing import PackedRow, PackingOptions
from tandem.trainer.steps import Steps
from tandem.trainer.update import UpdateOptions


class Critic(PackedModel):
    """A value model (`value_skeleton`), asked for the value of the state in which each token was chosen.

    That state is the sequence before the token: what the policy saw when it drew it.
    """

    @override
    def forward(self, row: PackedRow) -> Float[Tensor, " N"]:
        """Value of each token's state, in the reward's unit; float32."""
        return head_values(self.model, self.hidden(row))


@dataclass(frozen=True)
class CriticBatch:
    """What one step's update of the critic is computed from."""

    rollouts: Rollouts
    returns: Float[Tensor, "B L"]  # what the values shall be
    values: Float[Tensor, "B L"]  # before the update: those that the advantages were computed from
    loss_mask: Bool[Tensor, "B L"]


@torch.no_grad()
def batch_values(
    critic: Critic, rollouts: Rollouts, options: PackingOptions, ranks: Ranks = ALONE
) -> Float[Tensor, "B L"]:
    """Values of all response tokens' states, without gradients; zeros beyond each response.

    Each of `ranks` runs some of the rows, and all of them get the whole.
    """
    result = torch.zeros(rollouts.response_tokens.shape, dtype=torch.float32)
    for rows, row in critic.packed(rollouts, range(len(rollouts)), options, ranks):
        result[rows] = row.to_matrix(critic(row)).cpu()
    return ranks.sum(result.to(critic.device)).cpu()


def update_critic(
    critic: Critic,
    optimizer: Optimizer,
    batch: CriticBatch,
    options: UpdateOptions,
    ranks: Ranks = ALONE,
    *,
    clip: float | None,
    lr: float,
    seed: tuple[int, ...],
) -> CriticUpdate:
    """Descend the value loss on one step's rollouts: mini-batches, ranks and denominators are as in `update_policy`.

    The loss of a mini-batch is the mean over its tokens. A row without one is not run.

    Args:
        critic, optimizer: What is updated.
        batch: Rollouts with returns and values.
        options: How the rollouts are cut.
        ranks: Those that make the update together.
        clip: See `clipped_value_loss`.
        lr: Learning rate.
        seed: Of the mini-batches' order.

    Raises:
        TrainingError: Too many updates in a row were not finite.
    """
    order = mini_batches(
        batch.rollouts, size=options.mini_batch_responses, shuffle=options.shuffle, epochs=options.epochs, seed=seed
    )
    has_token = batch.loss_mask.any(dim=1)
    steps = Steps(optimizer, lr)
    num_clipped = num_tokens = 0.0
    with optimizer.weights.collecting():
        for rows in order:
            active = [row for row in rows if bool(has_token[row])]
            if active:
                sums = _backward(critic, batch, active, options.packing, ranks, clip)
                steps.take(sums.loss)
                num_clipped, num_tokens = num_clipped + sums.num_clipped, num_tokens + sums.num_tokens
    return CriticUpdate(
        loss=steps.loss,
        clip_fraction=num_clipped / max(num_tokens, 1.0),
        value_mean=float(batch.values[batch.loss_mask].double().mean()),
        explained_variance=explained_variance(batch.values, batch.returns, batch.loss_mask),
        grad_norm=steps.grad_norm,
        lr=lr,
        num_updates=steps.num_taken,
        num_skipped=steps.num_skipped,
    )


@dataclass(frozen=True)
class _Sums:
    """Of one mini-batch, over all ranks."""

    loss: float
    num_clipped: float
    num_tokens: float


def _backward(
    critic: Critic,
    batch: CriticBatch,
    active: Sequence[int],
    packing: PackingOptions,
    ranks: Ranks,
    clip: float | None,
) -> _Sums:
    """Add up the gradients of this rank's rows of one mini-batch."""
    weights = torch.zeros(batch.loss_mask.shape, dtype=torch.float32)
    weights[list(active)] = token_weights("token_mean", batch.loss_mask[list(active)])  # of the whole mini-batch
    totals = torch.zeros(3, dtype=torch.float64, device=critic.device)
    for part, row in critic.packed(batch.rollouts, active, packing, ranks):
        values = row.to_matrix(critic(row))
        if not part:  # other ranks have more micro-batches, and take this one to add up their gradients
            values.sum().backward()
            continue
        mask, old, returns = (
            matrix[part].to(critic.device) for matrix in (batch.loss_mask, batch.values, batch.returns)
        )
        token_loss = clipped_value_loss(
            torch.where(mask, values, 0.0), torch.where(mask, old, 0.0), torch.where(mask, returns, 0.0), clip=clip
        )
        loss = (weights[part].to(critic.device) * token_loss.loss).sum()
        loss.backward()
        totals += torch.stack([loss.detach().double(), token_loss.clipped.sum().double(), mask.sum().double()])
    return _Sums(*ranks.sum(totals).tolist())
