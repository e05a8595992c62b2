"""Advantages of tokens against plain loops over Python numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.algorithm.token_advantages import (
    gae,
    gae_advantages,
    reinforce_plus_plus_advantages,
    remax_advantages,
    token_rewards,
)

NAN = float("nan")
ROWS, WIDTH = 5, 7


def random_step(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and a mask with gaps; one row has a single token and one has none."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, ROWS, WIDTH, generator=generator)
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[3] = mask[4] = False
    mask[3, 2] = True
    return rewards, values, mask


def places(mask: Tensor, row: int) -> list[int]:
    return mask[row].nonzero().flatten().tolist()


def test_the_reward_stands_on_the_last_token_in_the_mask() -> None:
    mask = torch.tensor([[True, True, False, True, False], [True, False, False, False, False], [False] * 5])
    placed = token_rewards(torch.tensor([2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0.0, 0.0, 0.0, 2.0, 0.0], [3.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 5]
    penalty = torch.full((3, 5), 0.5).masked_fill(~mask, NAN)
    paid = token_rewards(torch.tensor([2.0, 3.0, 4.0]), mask, penalty)
    assert paid.tolist() == [[-0.5, -0.5, 0.0, 1.5, 0.0], [2.5, 0.0, 0.0, 0.0, 0.0], [0.0] * 5]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 1.0), (1.0, 0.0), (0.8, 0.5), (0.0, 0.7)])
def test_gae_is_the_sum_of_discounted_errors_of_the_values(gamma: float, lam: float) -> None:
    rewards, values, mask = random_step(0)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(ROWS):
        own = places(mask, row)
        r, v = [[matrix[row, t].item() for t in own] for matrix in (rewards, values)]
        delta = [r[k] + gamma * (v[k + 1] if k + 1 < len(own) else 0.0) - v[k] for k in range(len(own))]
        for k, t in enumerate(own):
            expected = sum((gamma * lam) ** (later - k) * delta[later] for later in range(k, len(own)))
            assert advantages[row, t].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
            assert returns[row, t].item() == pytest.approx(expected + v[k], rel=1e-12, abs=1e-12)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_with_lam_1_the_returns_are_the_discounted_rewards_to_go_whatever_the_values() -> None:
    rewards, values, mask = random_step(1)
    _, returns = gae(rewards, values, mask, gamma=0.9)
    for row in range(ROWS):
        own = places(mask, row)
        for k, t in enumerate(own):
            expected = sum(0.9**later * rewards[row, s].item() for later, s in enumerate(own[k:]))
            assert returns[row, t].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_with_lam_0_the_returns_trust_the_next_value() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.3, 0.5, 0.9]])
    _, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.5, lam=0.0)
    assert returns[0].tolist() == pytest.approx([0.25, 0.45, 1.0])


def test_gae_advantages_are_whitened_over_the_tokens() -> None:
    rewards, values, mask = random_step(2)
    raw, _ = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    numbers = raw[mask].tolist()
    mean = sum(numbers) / len(numbers)
    std = (sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)) ** 0.5
    advantages = gae_advantages(rewards, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantages[mask], ((raw[mask] - mean) / std).float(), rtol=1e-6, atol=1e-6)
    assert not advantages[~mask].any()


def test_reinforce_plus_plus_whitens_what_comes_from_each_token_on() -> None:
    rewards, _, mask = random_step(3)
    to_go = {
        (row, t): sum(0.9**later * rewards[row, s].item() for later, s in enumerate(places(mask, row)[k:]))
        for row in range(ROWS)
        for k, t in enumerate(places(mask, row))
    }
    mean = sum(to_go.values()) / len(to_go)
    std = (sum((x - mean) ** 2 for x in to_go.values()) / (len(to_go) - 1)) ** 0.5
    advantages = reinforce_plus_plus_advantages(rewards, mask, gamma=0.9)
    for (row, t), value in to_go.items():
        assert advantages[row, t].item() == pytest.approx((value - mean) / std, abs=1e-6)
    assert not advantages[~mask].any()


def test_remax_subtracts_the_greedy_reward() -> None:
    rewards, _, mask = random_step(4)
    baselines = torch.tensor([0.5, NAN, -1.0, 2.0, 0.0])
    advantages = remax_advantages(rewards, mask, baselines)
    for row in (0, 2, 3, 4):
        for k, t in enumerate(places(mask, row)):
            expected = sum(rewards[row, s].item() for s in places(mask, row)[k:]) - baselines[row].item()
            assert advantages[row, t].item() == pytest.approx(expected, abs=1e-6)
    assert not advantages[1].any()
    assert not advantages[~mask].any()


def test_a_response_as_good_as_the_greedy_one_is_exactly_zero() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages = remax_advantages(token_rewards(torch.tensor([0.1]), mask), mask, torch.tensor([0.1]))
    assert not advantages.any()


def test_estimates_carry_no_gradient() -> None:
    rewards, values, mask = random_step(5)
    given = [matrix.requires_grad_() for matrix in (rewards, values, torch.zeros(ROWS))]
    estimates = (*gae(given[0], given[1], mask), remax_advantages(given[0], mask, given[2]))
    assert not any(estimate.requires_grad for estimate in estimates)


def test_no_response_at_all_is_no_error() -> None:
    nothing, mask = torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)
    assert gae_advantages(nothing, nothing, mask).shape == (0, 3)
    assert remax_advantages(nothing, mask, torch.zeros(0)).shape == (0, 3)
