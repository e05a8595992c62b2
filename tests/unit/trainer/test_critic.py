"""The critic: each value stands in its own row, and the update does not depend on how it is computed."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.algorithm.value_loss import clipped_value_loss
from tandem.batch import CriticUpdate, Rollouts
from tandem.errors import TrainingError
from tandem.model.skeleton import materialise
from tandem.model.value import HEAD, take_body, value_skeleton
from tandem.trainer.critic import Critic, CriticBatch, batch_values, update_critic
from tandem.trainer.master_weights import MasterWeights
from tandem.trainer.optim import Optimizer
from tandem.trainer.packing import Packing, PackingOptions
from tandem.trainer.update import UpdateOptions
from tandem.trainer.weights import Weights
from tests.unit.trainer.made import KeepGradient, make_rollouts, only_rows
from tests.unit.trainer.spread import CPU, whole_model

ONE_BY_ONE = PackingOptions("none")
CLIP = 0.3
LOGGED = ("loss", "clip_fraction", "value_mean", "explained_variance", "grad_norm")


@dataclass
class CriticTrainee:
    """A critic and what updates it, like `Trainee`."""

    critic: Critic
    weights: Weights
    optimizer: Optimizer


@functools.cache
def value_model() -> PreTrainedModel:
    """A tiny one whose values differ from token to token by about 1."""
    policy = whole_model()
    model = value_skeleton(policy.config)
    materialise(model, CPU)
    weights, of_policy = (MasterWeights(each, body_dtype=torch.float32, head_dtype=torch.float32).shards()
                          for each in (model, policy))  # fmt: skip
    take_body(model, weights, policy, of_policy)
    with torch.no_grad():
        model.get_parameter(HEAD).normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return model


def critic_trainee(
    *, keep_gradient: bool = False, checkpointing: bool = False, body_dtype: torch.dtype = torch.float32
) -> CriticTrainee:
    """A fresh one, always with the same weights."""
    model = copy.deepcopy(value_model())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    weights = MasterWeights(model, body_dtype=body_dtype, head_dtype=torch.float32)
    return CriticTrainee(Critic(model), weights, KeepGradient(weights) if keep_gradient else Optimizer(weights))


def critic_batch(rollouts: Rollouts) -> CriticBatch:
    """Old values some way off the critic's, so that clipping acts; returns further off."""
    values = batch_values(critic_trainee().critic, rollouts, ONE_BY_ONE)
    generator = torch.Generator().manual_seed(5)

    def off(distance: float) -> Tensor:
        return values + distance * torch.randn(values.shape, generator=generator)

    return CriticBatch(rollouts, returns=off(1.0), values=off(0.5), loss_mask=rollouts.response_mask)


def run_critic_update(
    learner: CriticTrainee, batch: CriticBatch, options: UpdateOptions | None = None, *, lr: float = 1e-3
) -> CriticUpdate:
    return update_critic(
        learner.critic, learner.optimizer, batch, options or UpdateOptions(), clip=CLIP, lr=lr, seed=(0, 1)
    )


def gradient_of(learner: CriticTrainee, batch: CriticBatch, options: UpdateOptions) -> tuple[Tensor, CriticUpdate]:
    result = run_critic_update(learner, batch, options)
    assert isinstance(learner.optimizer, KeepGradient)
    [gradient] = learner.optimizer.gradients
    assert gradient.norm() > 1e-3, "without a gradient nothing is shown"
    return gradient, result


def assert_same(found: CriticUpdate, expected: CriticUpdate, *, rel: float = 1e-4) -> None:
    for name in LOGGED:
        assert vars(found)[name] == pytest.approx(vars(expected)[name], rel=rel, abs=1e-6), name
    assert (found.num_updates, found.num_skipped) == (expected.num_updates, expected.num_skipped)


@pytest.mark.parametrize("max_tokens", [12, 10_000])
@pytest.mark.parametrize("packing", ["auto", "shared_prefix", "varlen"])
def test_fault_14_values_after_packing_and_reordering_are_in_their_own_rows(packing: Packing, max_tokens: int) -> None:
    """Also of a group whose rows are apart."""
    rollouts = make_rollouts()
    order = [7, 0, 11, 3, 1, 8, 4, 10, 2, 6, 9, 5]
    critic = critic_trainee().critic
    expected = batch_values(critic, rollouts, ONE_BY_ONE)
    assert expected.std() > 0.1
    values = batch_values(critic, only_rows(rollouts, order), PackingOptions(packing, max_tokens))
    torch.testing.assert_close(values, expected[order], rtol=0, atol=2e-5)
    assert not values[~rollouts.response_mask[order]].any()


def test_a_value_is_of_the_state_before_its_token() -> None:
    """Another token at column 2 changes the values behind it, and neither its own nor those before."""
    rollouts = make_rollouts(prompt_lengths=(4,), response_lengths=((6,),))
    tokens = rollouts.response_tokens.clone()
    tokens[0, 2] = 3 + tokens[0, 2] % 90
    critic = critic_trainee().critic
    values, others = (
        batch_values(critic, each, ONE_BY_ONE)[0] for each in (rollouts, replace(rollouts, response_tokens=tokens))
    )
    torch.testing.assert_close(values[:3], others[:3], rtol=0, atol=1e-6)
    assert ((values - others)[3:].abs() > 1e-4).all()


def test_the_loss_is_the_mean_over_all_tokens_of_the_mini_batch() -> None:
    """By hand, one sequence at a time."""
    batch = critic_batch(make_rollouts(holes=True))
    _, found = gradient_of(critic_trainee(keep_gradient=True), batch, UpdateOptions(PackingOptions("auto", 30)))
    values = batch_values(critic_trainee().critic, batch.rollouts, ONE_BY_ONE)
    tokens = clipped_value_loss(values, batch.values, batch.returns, clip=CLIP)
    assert found.loss == pytest.approx(float(tokens.loss[batch.loss_mask].mean()), rel=1e-5)
    assert found.clip_fraction == pytest.approx(float(tokens.clipped[batch.loss_mask].float().mean()))
    assert 0.05 < found.clip_fraction < 0.95
    assert found.value_mean == pytest.approx(float(batch.values[batch.loss_mask].mean()), rel=1e-5)
    assert found.explained_variance < 0.9


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("packing", "max_tokens"), [("auto", 10_000), ("shared_prefix", 16), ("varlen", 30)])
def test_fault_05_cut_into_micro_batches_the_gradient_is_the_same(
    packing: Packing, max_tokens: int, checkpointing: bool
) -> None:
    batch = critic_batch(make_rollouts(holes=True))
    expected, plain = gradient_of(critic_trainee(keep_gradient=True), batch, UpdateOptions(ONE_BY_ONE))
    learner = critic_trainee(keep_gradient=True, checkpointing=checkpointing)
    gradient, found = gradient_of(learner, batch, UpdateOptions(PackingOptions(packing, max_tokens)))
    assert (gradient - expected).norm() / expected.norm() < 1e-5
    assert_same(found, plain)


def test_fault_06_and_08_rows_and_tokens_outside_of_the_mask_have_no_effect() -> None:
    """NaN there, and whole rows without a token in the loss: as if they were not there."""
    batch = critic_batch(make_rollouts(holes=True))
    mask = batch.loss_mask.clone()
    mask[[2, 5]] = False
    poisoned = replace(
        batch,
        loss_mask=mask,
        returns=torch.where(mask, batch.returns, torch.nan),
        values=torch.where(mask, batch.values, torch.inf),
    )
    kept = [row for row in range(12) if row not in (2, 5)]
    without = CriticBatch(
        only_rows(batch.rollouts, kept), batch.returns[kept], batch.values[kept], batch.loss_mask[kept]
    )
    gradient, found = gradient_of(critic_trainee(keep_gradient=True), poisoned, UpdateOptions())
    expected, plain = gradient_of(critic_trainee(keep_gradient=True), without, UpdateOptions())
    assert (gradient - expected).norm() / expected.norm() < 1e-5
    assert_same(found, plain)


def test_without_any_token_nothing_is_updated() -> None:
    batch = critic_batch(make_rollouts())
    learner = critic_trainee()
    before = copy.deepcopy(learner.critic.model.state_dict())
    found = run_critic_update(learner, replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)))
    assert (found.num_updates, found.num_skipped, found.loss) == (0, 0, 0.0)
    assert math.isnan(found.value_mean)
    assert all(torch.equal(before[name], weight) for name, weight in learner.critic.model.state_dict().items())


def test_fault_10_an_update_that_is_not_finite_is_skipped_and_too_many_end_it() -> None:
    batch = critic_batch(make_rollouts())
    learner = critic_trainee()
    before = copy.deepcopy(learner.critic.model.state_dict())
    bad = replace(batch, returns=batch.returns.clone())
    bad.returns[0, 0] = torch.nan
    found = run_critic_update(learner, bad)
    assert (found.num_updates, found.num_skipped) == (0, 1)
    assert all(torch.equal(before[name], weight) for name, weight in learner.critic.model.state_dict().items())
    learner.optimizer = Optimizer(learner.weights, max_skipped=0, lr_key="critic.lr")
    with pytest.raises(TrainingError, match=r"lower critic\.lr"):
        run_critic_update(learner, bad)


def test_mini_batches_and_epochs_make_an_update_each() -> None:
    options = UpdateOptions(mini_batch_responses=5, shuffle="responses", epochs=2)
    found = run_critic_update(critic_trainee(), critic_batch(make_rollouts()), options)
    assert found.num_updates == 6


def test_it_learns_what_a_response_is_worth_from_what_it_begins_with() -> None:
    """Returns that are known from the first token on: 2 or -1. Before that token nothing better than their mean is."""
    rollouts = make_rollouts(response_lengths=((6,), (6,), (6,), (6,)) * 2, prompt_lengths=(4,) * 8)
    good = torch.arange(8) % 2 == 0
    tokens = rollouts.response_tokens.clone()
    tokens[:, 0] = torch.where(good, 5, 6)
    rollouts = replace(rollouts, response_tokens=tokens)
    returns = torch.where(good, 2.0, -1.0)[:, None].expand(8, 6).contiguous()
    learner = critic_trainee()
    updates = []
    for step in range(60):
        values = batch_values(learner.critic, rollouts, PackingOptions())
        batch = CriticBatch(rollouts, returns, values, rollouts.response_mask)
        updates.append(
            update_critic(learner.critic, learner.optimizer, batch, UpdateOptions(), clip=0.5, lr=3e-3, seed=(0, step))
        )
    assert updates[-1].loss < 0.2 * updates[0].loss
    assert updates[0].explained_variance < 0.2
    assert updates[-1].explained_variance > 0.8
    learned = batch_values(learner.critic, rollouts, PackingOptions())
    torch.testing.assert_close(learned[:, 1:], returns[:, 1:], rtol=0, atol=0.3)
