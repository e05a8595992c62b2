"""The critic on several ranks: values and gradients are those of one rank, whatever runs where."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tandem.batch import CriticUpdate
from tandem.model.ranks import Ranks
from tandem.model.value import value_skeleton
from tandem.trainer.critic import Critic, batch_values, update_critic
from tandem.trainer.fsdp import ShardedWeights, training_mesh
from tandem.trainer.packing import PackingOptions
from tandem.trainer.update import UpdateOptions
from tests.ranks import RankProcesses
from tests.unit.trainer.made import KeepGradient, make_rollouts, only_rows
from tests.unit.trainer.spread import CPU, rows_of
from tests.unit.trainer.test_critic import (
    CLIP,
    ONE_BY_ONE,
    CriticTrainee,
    assert_same,
    critic_batch,
    critic_trainee,
    gradient_of,
    value_model,
)

Outcome = tuple[Tensor, CriticUpdate, Tensor]  # values before, result, gradient


def spread_critic(ranks: Ranks, body_dtype: torch.dtype) -> CriticTrainee:
    """On each rank its part of what `critic_trainee` makes."""
    whole = value_model()
    critic = Critic(value_skeleton(whole.config), body_dtype=body_dtype)
    mesh = training_mesh(ranks, replicas=1, device=CPU)
    weights = ShardedWeights(critic, mesh, head_dtype=torch.float32, device=CPU)
    for name, shard in weights.shards().items():
        shard.tensor.data.copy_(rows_of(shard, whole.get_parameter(name)))
    return CriticTrainee(critic, weights, KeepGradient(weights))


def outcomes(
    processes: RankProcesses, size: int, rows: Sequence[int], body_dtype: torch.dtype = torch.float32
) -> list[Outcome]:
    """What each rank has, with rows of very different length, cut finely."""
    options = UpdateOptions(PackingOptions("auto", 30))

    def update(ranks: Ranks) -> Outcome:
        learner = spread_critic(ranks, body_dtype)
        batch = critic_batch(only_rows(make_rollouts(holes=True), rows))
        values = batch_values(learner.critic, batch.rollouts, options.packing, ranks)
        result = update_critic(
            learner.critic, learner.optimizer, batch, options, ranks, clip=CLIP, lr=1e-3, seed=(0, 1)
        )
        assert isinstance(learner.optimizer, KeepGradient)
        sizes = [weight.numel() for weight in learner.weights.parameters()]
        pieces = ranks.gather(learner.optimizer.gradients[0].split(sizes))
        joined = torch.cat([torch.cat(of_one_weight) for of_one_weight in zip(*pieces, strict=True)])
        return values, result, joined

    return processes.run(update, size)


@pytest.mark.parametrize(("size", "num_rows"), [(2, 12), (4, 12), (4, 1)], ids=["two", "four", "three without rows"])
def test_fault_05_14_28_ranks_give_the_same_values_and_the_same_gradient(
    ranks: RankProcesses, size: int, num_rows: int
) -> None:
    batch = critic_batch(only_rows(make_rollouts(holes=True), range(num_rows)))
    expected_values = batch_values(critic_trainee().critic, batch.rollouts, ONE_BY_ONE)
    expected, plain = gradient_of(critic_trainee(keep_gradient=True), batch, UpdateOptions(ONE_BY_ONE))
    found = outcomes(ranks, size, range(num_rows))
    for values, result, gradient in found:
        torch.testing.assert_close(values, expected_values, rtol=0, atol=2e-5)
        assert (gradient - expected).norm() / expected.norm() < 1e-5
        assert_same(result, plain)
        assert result == found[0][1], "to the bit: what ranks decide by must not differ"


def test_in_bfloat16_the_body_is_rounded_and_the_head_is_not(ranks: RankProcesses) -> None:
    """On ranks as on one: to 0.03, where values differ by about 1 from token to token."""
    one = critic_trainee(body_dtype=torch.bfloat16)
    batch = critic_batch(make_rollouts(holes=True))
    expected = batch_values(one.critic, batch.rollouts, ONE_BY_ONE)
    for values, _, _ in outcomes(ranks, 2, range(12), torch.bfloat16):
        torch.testing.assert_close(values, expected, rtol=0, atol=0.03)
        exact = batch_values(critic_trainee().critic, batch.rollouts, ONE_BY_ONE)
        assert (values - exact).abs().max() > 1e-4, "nothing was rounded"
