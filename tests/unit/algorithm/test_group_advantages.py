"""Advantages of responses by group: means, degenerate groups, responses without a reward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.algorithm.group_advantages import (
    grpo_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)

NAN = float("nan")
# Where types and shapes of arguments are checked at run time, these errors come first.
WRONG_ARGUMENT = (ValueError, TypeError)


def advantages_of(rewards, group_ids=None, dtype=torch.float32, **options):
    group_ids = [0] * len(rewards) if group_ids is None else group_ids
    return grpo_advantages(torch.tensor(rewards, dtype=dtype), torch.tensor(group_ids), **options)


def test_each_response_is_compared_with_its_own_group():
    advantages = advantages_of([1.0, 10.0, 0.0, 10.0, 0.5, 40.0], group_ids=[7, 2, 7, 2, 7, 2])
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [0.5, -10.0, -0.5, -10.0, 0.0, 20.0]


def test_groups_may_have_any_size():
    assert advantages_of([1.0, 0.0, 3.0, 3.0, 0.0], group_ids=[0, 0, 1, 1, 1]).tolist() == [0.5, -0.5, 1.0, 1.0, -2.0]


def test_group_normalisation_uses_the_sample_standard_deviation():
    rewards = [1.0, 0.0, 0.0, 0.0]
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6)
    torch.testing.assert_close(advantages_of(rewards, normalize_std=True), expected)
    torch.testing.assert_close(advantages_of(rewards, normalize_std="group"), expected)


def test_batch_normalisation_uses_all_valid_rewards():
    rewards = torch.tensor([1.0, 0.0, 5.0, 2.0, NAN])
    valid = torch.tensor([True, True, True, True, False])
    advantages = grpo_advantages(rewards, torch.tensor([0, 0, 1, 1, 1]), valid=valid, normalize_std="batch", eps=0.0)
    std = torch.tensor([1.0, 0.0, 5.0, 2.0]).std()
    torch.testing.assert_close(advantages, torch.tensor([0.5, -0.5, 1.5, -1.5, 0.0]) / std)


def test_eps_is_added_to_the_standard_deviation():
    assert advantages_of([1.0, -1.0], normalize_std=True, eps=2.0 - 2.0**0.5).tolist() == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize("normalize_std", ["none", "group", "batch"])
@pytest.mark.parametrize(("reward", "size"), [(0.35, 8), (0.1, 6), (1 / 3, 7), (0.7, 3), (1e30, 5)])
def test_fault_01_equal_rewards_give_exactly_zero(reward, size, normalize_std):
    for dtype in (torch.float32, torch.float64):
        advantages = advantages_of([reward] * size, dtype=dtype, normalize_std=normalize_std)
        assert torch.equal(advantages, torch.zeros(size))


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf"), 123.0])
def test_fault_03_responses_without_a_reward_are_left_out_of_their_group(bad):
    rewards = torch.tensor([1.0, bad, 0.0, bad, 2.0, 4.0])
    valid = torch.tensor([True, False, True, False, True, True])
    group_ids = torch.tensor([0, 0, 0, 0, 1, 1])
    for normalize_std in ("none", "group"):
        advantages = grpo_advantages(rewards, group_ids, valid=valid, normalize_std=normalize_std, eps=0.0)
        scale = 1.0 if normalize_std == "none" else 2.0**0.5
        torch.testing.assert_close(advantages[:4], torch.tensor([0.5, 0.0, -0.5, 0.0]) * scale)
        torch.testing.assert_close(advantages[4:], torch.tensor([-1.0, 1.0]) * (1.0 if scale == 1.0 else 1 / 2.0**0.5))


@pytest.mark.parametrize("normalize_std", ["none", "group", "batch"])
def test_fewer_than_two_valid_rewards_give_zero(normalize_std):
    rewards = torch.tensor([3.0, NAN, NAN, NAN, 5.0])
    valid = torch.tensor([True, False, False, False, True])
    advantages = grpo_advantages(rewards, torch.tensor([0, 0, 1, 1, 2]), valid=valid, normalize_std=normalize_std)
    assert torch.equal(advantages, torch.zeros(5))


def test_a_valid_reward_that_is_not_finite_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"\[2\] are not finite"):
        advantages_of([1.0, 0.0, NAN])


def test_shapes_that_do_not_fit_are_an_error():
    with pytest.raises(WRONG_ARGUMENT, match=r"one entry for each response|group_ids"):
        grpo_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


def test_an_unknown_normalisation_is_an_error():
    with pytest.raises(WRONG_ARGUMENT, match=r"none.*group.*batch"):
        advantages_of([1.0, 0.0], normalize_std="std")


def test_no_response_at_all_is_no_error():
    assert grpo_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_small_differences_of_large_float32_rewards_are_exact():
    rewards = 1000.0 + torch.rand(64, generator=torch.Generator().manual_seed(0))
    expected = (rewards.double() - rewards.double().mean()).float()
    assert not torch.equal(rewards - rewards.mean(), expected)
    advantages = grpo_advantages(rewards, torch.zeros(64, dtype=torch.int64))
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_groups_sum_to_zero_and_order_does_not_matter(seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(40, generator=generator)
    group_ids = torch.randint(0, 7, (40,), generator=generator)
    valid = torch.rand(40, generator=generator) < 0.8
    advantages = grpo_advantages(rewards, group_ids, valid=valid, normalize_std="group")
    for group in group_ids.unique():
        assert advantages[group_ids == group].sum().item() == pytest.approx(0.0, abs=1e-5)
    order = torch.randperm(40, generator=generator)
    again = grpo_advantages(rewards[order], group_ids[order], valid=valid[order], normalize_std="group")
    torch.testing.assert_close(again, advantages[order])


def test_advantages_carry_no_gradient():
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not grpo_advantages(rewards, torch.tensor([0, 0])).requires_grad


# --- rloo -------------------------------------------------------------------------------------------------------------


def random_step(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, group ids, valid and mask of 30 responses in seven groups, with one of no contrast and one of one."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(30, generator=generator)
    group_ids = torch.cat([torch.tensor([9, 8, 8, 8]), torch.randint(0, 5, (26,), generator=generator)])
    rewards[1:4] = 0.1
    valid = torch.rand(30, generator=generator) < 0.8
    mask = torch.rand(30, 5, generator=generator) < 0.7
    mask[:, 0] = True
    return torch.where(valid, rewards, NAN), group_ids, valid, mask


@pytest.mark.parametrize("seed", range(3))
def test_rloo_compares_with_the_mean_of_the_others(seed: int) -> None:
    rewards, group_ids, valid, _ = random_step(seed)
    advantages = rloo_advantages(rewards, group_ids, valid=valid).tolist()
    numbers, groups, there = rewards.double().tolist(), group_ids.tolist(), valid.tolist()
    for i in range(30):
        others = [numbers[j] for j in range(30) if j != i and there[j] and groups[j] == groups[i]]
        alone = not there[i] or not others
        assert advantages[i] == pytest.approx(0.0 if alone else numbers[i] - sum(others) / len(others), abs=1e-6)


def test_rloo_is_exact_where_rewards_are_large() -> None:
    advantages = rloo_advantages(torch.tensor([1e7, 1e7 + 1.0, 1e7 + 2.0]), torch.zeros(3, dtype=torch.int64))
    assert advantages.tolist() == [-1.5, 0.0, 1.5]


# --- reinforce_plus_plus_baseline -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_reinforce_plus_plus_baseline_is_the_group_mean_then_the_scale_of_all_tokens(seed: int) -> None:
    rewards, group_ids, valid, mask = random_step(seed)
    advantages = reinforce_plus_plus_baseline_advantages(rewards, group_ids, mask, valid=valid)
    numbers, groups, there = rewards.double().tolist(), group_ids.tolist(), valid.tolist()
    centred: dict[int, float] = {}
    flat: set[int] = set()
    for i in range(30):
        own = [numbers[j] for j in range(30) if there[j] and groups[j] == groups[i]]
        if there[i]:
            centred[i] = numbers[i] - sum(own) / len(own)
        if len(set(own)) < 2:
            flat.add(i)
    tokens = [centred[i] for i in centred for t in range(5) if mask[i, t]]
    mean = sum(tokens) / len(tokens)
    std = (sum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1)) ** 0.5
    for i in range(30):
        expected = 0.0 if i in flat or i not in centred else (centred[i] - mean) / std
        for t in range(5):
            assert advantages[i, t].item() == pytest.approx(expected if mask[i, t] else 0.0, abs=1e-6)


def test_reinforce_plus_plus_baseline_has_the_scale_of_the_step_not_of_the_group() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.0, 100.0])
    mask = torch.ones(4, 1, dtype=torch.bool)
    advantages = reinforce_plus_plus_baseline_advantages(rewards, torch.tensor([0, 0, 1, 1]), mask)[:, 0]
    assert (advantages[3] / advantages[1]).item() == pytest.approx(100.0, rel=1e-5)
