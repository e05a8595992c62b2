from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.errors import TrainingError
from tandem.trainer.optim import Optimizer, Schedule
from tests.unit.trainer.made import Trainee, trainee


def fill_gradients(learner: Trainee, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    for weight in learner.weights.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator) * scale
    return learner.gradient()


def test_constant_after_a_linear_rise() -> None:
    schedule = Schedule(lr=1.0, warmup_steps=4)
    assert [schedule.at(step) for step in (1, 2, 3, 4, 5, 1000)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert Schedule(lr=2.0).at(1) == 2.0


def test_linear_falls_to_its_fraction_at_the_last_step() -> None:
    schedule = Schedule(lr=1.0, kind="linear", warmup_steps=2, total_steps=12, final=0.1)
    assert [schedule.at(step) for step in (1, 2, 7, 12)] == pytest.approx([0.5, 1.0, 0.55, 0.1])
    assert schedule.at(99) == pytest.approx(0.1)
    assert Schedule(lr=1.0, kind="linear", total_steps=10).at(10) == 0.0


def test_cosine_falls_slowly_fast_slowly() -> None:
    schedule = Schedule(lr=2.0, kind="cosine", total_steps=8, final=0.5)
    expected = [2.0 * (0.5 + 0.5 * 0.5 * (1 + math.cos(math.pi * step / 8))) for step in range(1, 9)]
    assert [schedule.at(step) for step in range(1, 9)] == pytest.approx(expected)
    assert schedule.at(8) == pytest.approx(1.0)


def test_the_warm_up_may_be_longer_than_the_run() -> None:
    schedule = Schedule(lr=1.0, kind="cosine", warmup_steps=10, total_steps=5)
    assert schedule.at(5) == 0.5
    assert schedule.at(11) == pytest.approx(0.0)


def test_a_step_is_that_of_adamw() -> None:
    """Two steps by the formula (arXiv:1711.05101, algorithm 2), with decay, below the clipping norm."""
    learner = trainee()
    learner.optimizer = Optimizer(learner.weights, betas=(0.8, 0.9), weight_decay=0.1, max_grad_norm=1e9)
    expected = learner.vector().double()
    first = torch.zeros_like(expected)
    second = torch.zeros_like(expected)
    for step, lr in ((1, 1e-2), (2, 3e-2)):
        gradient = fill_gradients(learner, seed=step).double()
        learner.optimizer.step(lr, loss_is_finite=True)
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient.square()
        expected = expected * (1 - lr * 0.1)
        expected -= lr * (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-8)
    torch.testing.assert_close(learner.vector().double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_gradients_above_the_norm_are_scaled_down_to_it_and_others_left_alone(scale: float) -> None:
    """Seen in AdamW's first moment, which is a tenth of the gradient it was given."""
    learner = trainee()
    learner.optimizer = Optimizer(learner.weights, max_grad_norm=0.5)
    gradient = fill_gradients(learner, scale)
    outcome = learner.optimizer.step(1e-3, loss_is_finite=True)
    assert outcome.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    state = learner.optimizer.adamw.state
    given = torch.cat([state[weight]["exp_avg"].flatten() for weight in learner.weights.parameters()]) * 10
    expected = gradient * min(1.0, 0.5 / float(gradient.norm()))
    assert (given - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_fault_10_one_number_that_is_not_finite_changes_neither_weights_nor_moments(number: float) -> None:
    learner = trainee()
    fill_gradients(learner)
    learner.optimizer.step(1e-2, loss_is_finite=True)
    weights = learner.vector()
    moments = [learner.optimizer.adamw.state[weight]["exp_avg"].clone() for weight in learner.weights.parameters()]
    fill_gradients(learner, seed=1)
    next(learner.weights.parameters()).grad.view(-1)[3] = number
    outcome = learner.optimizer.step(1e-2, loss_is_finite=True)
    assert not outcome.taken
    assert torch.equal(learner.vector(), weights)
    for weight, before in zip(learner.weights.parameters(), moments, strict=True):
        state = learner.optimizer.adamw.state[weight]
        assert torch.equal(state["exp_avg"], before)
        assert float(state["step"]) == 1.0


def test_fault_10_a_loss_that_is_not_finite_is_enough_to_skip() -> None:
    learner = trainee()
    before = learner.vector()
    fill_gradients(learner)
    assert not learner.optimizer.step(1e-2, loss_is_finite=False).taken
    assert torch.equal(learner.vector(), before)


def test_fault_10_only_skipped_updates_in_a_row_count() -> None:
    learner = trainee(max_skipped=1)
    for is_finite in (False, True, False, True, False):
        fill_gradients(learner)
        learner.optimizer.step(1e-3, loss_is_finite=is_finite)
    fill_gradients(learner)
    with pytest.raises(TrainingError, match="2 updates in a row"):
        learner.optimizer.step(1e-3, loss_is_finite=False)


def test_reset_forgets_moments_and_counter() -> None:
    learner = trainee()
    fill_gradients(learner)
    learner.optimizer.step(1e-2, loss_is_finite=True)
    fill_gradients(learner)
    learner.optimizer.step(1e-2, loss_is_finite=False)
    learner.optimizer.reset()
    assert learner.optimizer.skipped_in_row == 0
    assert not learner.optimizer.adamw.state
