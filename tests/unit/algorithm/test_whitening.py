"""Whitening: mean 0, variance 1, and what happens where there is no variance."""

from __future__ import annotations

import pytest
import torch

from tandem.algorithm.whitening import whiten

NAN = float("nan")


def test_mean_0_and_variance_1_over_the_mask() -> None:
    values = torch.tensor([[1.0, 2.0, NAN], [4.0, float("inf"), 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    whitened = whiten(values, mask)
    assert whitened.dtype == torch.float64
    assert whitened[mask].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert whitened[mask].var().item() == pytest.approx(1.0, rel=1e-6)
    assert whitened[~mask].tolist() == [0.0, 0.0]
    assert whitened[0, 1].item() == pytest.approx((2.0 - 4.0) / (38.0 / 3) ** 0.5)


@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 7])
def test_without_spread_it_is_exactly_zero(values: list[float]) -> None:
    numbers = torch.tensor([*values, NAN], dtype=torch.float64)  # in which the mean of 0.1 is not 0.1
    assert not whiten(numbers, numbers.isfinite()).any()


def test_eps_is_added_to_the_variance() -> None:
    whitened = whiten(torch.tensor([1.0, -1.0]), torch.tensor([True, True]), eps=2.0)
    assert whitened.tolist() == pytest.approx([0.5, -0.5])
