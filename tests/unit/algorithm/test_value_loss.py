from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithm.value_loss import clipped_value_loss, explained_variance


def test_the_loss_is_the_larger_of_two_squares() -> None:
    """Value, old value, return, clip 0.5 -> loss, worked out by hand."""
    cases = [
        (0.2, 0.0, 1.0, 0.5 * 0.8**2, False),  # within the range
        (0.9, 0.0, 1.0, 0.5 * 0.5**2, True),  # has come too close: counted as 0.5, which is further away
        (0.9, 0.0, -1.0, 0.5 * 1.9**2, False),  # has gone the wrong way: counted in full
        (1.4, 0.0, 0.9, 0.5 * 0.5**2, False),  # beyond the return, as far as 0.4 is before it and more
        (-0.9, 0.0, -1.0, 0.5 * 0.5**2, True),
    ]
    for value, old, wanted, loss, clipped in cases:
        found = clipped_value_loss(torch.tensor(value), torch.tensor(old), torch.tensor(wanted), clip=0.5)
        assert float(found.loss) == pytest.approx(loss, rel=1e-6)
        assert bool(found.clipped) == clipped


def test_the_gradient_is_the_distance_and_ends_where_the_value_is_clipped() -> None:
    values = torch.tensor([0.2, 0.9, 0.9], requires_grad=True)
    old, returns = torch.zeros(3, requires_grad=True), torch.tensor([1.0, 1.0, -1.0], requires_grad=True)
    clipped_value_loss(values, old, returns, clip=0.5).loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.8, 0.0, 1.9])
    assert old.grad is None
    assert returns.grad is None


def test_without_a_clip_it_is_half_the_square() -> None:
    values, old, returns = torch.tensor([0.9, 5.0]), torch.zeros(2), torch.tensor([1.0, 1.0])
    found = clipped_value_loss(values, old, returns, clip=None)
    assert found.loss.tolist() == pytest.approx([0.005, 8.0])
    assert not found.clipped.any()


def test_at_the_values_that_the_step_began_with_nothing_is_clipped() -> None:
    values = torch.tensor([0.3, -2.0, 7.0])
    found = clipped_value_loss(values, values, torch.tensor([1.0, 1.0, 1.0]), clip=1e-3)
    assert not found.clipped.any()


def test_explained_variance() -> None:
    returns = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 100.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns + 5.0, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(2, 3), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns / 2, returns, mask) == pytest.approx(0.75)


def test_explained_variance_of_nothing_or_of_equal_returns_is_not_defined() -> None:
    values, returns = torch.tensor([[0.1, 0.2]]), torch.tensor([[0.35, 0.35]])
    for mask in ([[True, True]], [[True, False]], [[False, False]]):
        assert math.isnan(explained_variance(values, returns, torch.tensor(mask)))


def test_fault_08_what_is_outside_of_the_mask_explains_nothing() -> None:
    returns = torch.tensor([[0.0, 1.0, torch.nan, torch.inf]])
    values = torch.tensor([[0.0, 1.0, torch.inf, torch.nan]])
    assert explained_variance(values, returns, torch.tensor([[True, True, False, False]])) == 1.0
