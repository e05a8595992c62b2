"""Faults that users of such systems have met: for every estimator, and for those in examples/losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from examples.losses.gdpo import gdpo
from examples.losses.grpo_passk import grpo_passk
from examples.losses.opo import opo
from tandem.algorithm.advantages import ADVANTAGES, estimate_advantages
from tandem.algorithm.protocols import AdvantageFunction
from tandem.batch import Prompt, Response, Rewards, Rollouts
from tandem.config.algorithm import AlgorithmConfig

NAN = float("nan")
EXAMPLES: dict[str, AdvantageFunction] = {"opo": opo, "grpo_passk": grpo_passk, "gdpo": gdpo}
EVERY = (*ADVANTAGES, *EXAMPLES)
# These two compare tokens with the whole step, or with a critic: they know of no groups.
BY_GROUP = tuple(name for name in EVERY if name not in ("reinforce_plus_plus", "gae"))


def rollouts_of(group_sizes: tuple[int, ...], lengths: list[int], truncated: tuple[int, ...] = ()) -> Rollouts:
    places = [(group, index) for group, size in enumerate(group_sizes) for index in range(size)]
    responses = [
        Response(
            group,
            index,
            tokens=(5,) * length,
            logprobs=(-1.0,) * length,
            text="r",
            finish_reason="length" if row in truncated else "stop",
        )
        for row, ((group, index), length) in enumerate(zip(places, lengths, strict=True))
    ]
    return Rollouts.from_responses([Prompt(tokens=(1,), text="p")] * len(group_sizes), responses)


def rewards_of(values: Tensor, valid: Tensor | None = None) -> Rewards:
    """With the rewards as the one component and, halved, as greedy baselines."""
    valid = torch.ones(len(values), dtype=torch.bool) if valid is None else valid
    return Rewards(values=values, valid=valid, components={"right": values}, baselines=values.nan_to_num() / 2)


def per_token(
    name: str, rewards: Rewards, rollouts: Rollouts, *, config: dict | None = None, **given: Tensor | None
) -> Tensor:
    """Advantages as [B, L], by the estimator or the example of this name. Without values, a critic that says 0."""
    section = AlgorithmConfig(**{"advantage": name if name in ADVANTAGES else "grpo", **(config or {})})
    given = {"values": torch.zeros(rollouts.response_mask.shape), **given}
    advantages = estimate_advantages(section, rewards, rollouts, function=EXAMPLES.get(name), **given)
    assert advantages.dtype == torch.float32
    assert bool(advantages.isfinite().all())
    per_response = advantages.ndim == 1
    return advantages[:, None] * rollouts.response_mask if per_response else advantages


def only(rows: Tensor, rewards: Rewards, rollouts: Rollouts) -> tuple[Rewards, Rollouts]:
    """A step in which the other responses were never drawn."""
    kept = rows.nonzero().flatten().tolist()
    fewer = replace(
        rollouts,
        group_ids=rollouts.group_ids[rows],
        response_tokens=rollouts.response_tokens[rows],
        response_lengths=rollouts.response_lengths[rows],
        response_mask=rollouts.response_mask[rows],
        rollout_logprobs=rollouts.rollout_logprobs[rows],
        texts=tuple(rollouts.texts[row] for row in kept),
        finish_reasons=tuple(rollouts.finish_reasons[row] for row in kept),
    )
    return replace(rewards_of(rewards.values[rows], rewards.valid[rows]), baselines=rewards.baselines[rows]), fewer


@pytest.mark.parametrize(("reward", "size"), [(0.35, 8), (0.1, 6), (1 / 3, 7), (0.7, 3)])
@pytest.mark.parametrize("name", EVERY)
def test_fault_01_equal_rewards_give_exactly_zero(name: str, reward: float, size: int) -> None:
    rollouts = rollouts_of((size,), list(range(1, size + 1)))
    rewards = replace(rewards_of(torch.full((size,), reward)), baselines=torch.full((size,), reward))
    assert not per_token(name, rewards, rollouts).any()
    if name == "gae":  # and with a critic that knows them
        values = torch.full(rollouts.response_mask.shape, reward)
        assert not per_token(name, rewards, rollouts, values=values, config={"lam": 0.5}).any()


@pytest.mark.parametrize("name", EVERY)
def test_fault_02_one_success_in_four_is_better_by_a_finite_amount(name: str) -> None:
    rewards = replace(rewards_of(torch.tensor([1.0, 0.0, 0.0, 0.0])), baselines=torch.zeros(4))
    advantages = per_token(name, rewards, rollouts_of((4,), [1, 1, 1, 1]))[:, 0].tolist()
    assert 0.5 < advantages[0] < 2.0
    assert advantages[1] == advantages[2] == advantages[3]
    assert -1.0 < advantages[1] <= 0.0
    if name == "rloo":
        assert advantages == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("bad", [NAN, float("inf"), 0.0, 1e30])
@pytest.mark.parametrize("name", EVERY)
def test_fault_03_responses_without_a_reward_are_as_if_never_drawn(name: str, bad: float) -> None:
    values = torch.tensor([1.0, bad, 0.0, bad, 2.0, 4.0, 0.5])
    rewards = rewards_of(values, torch.tensor([True, False, True, False, True, True, True]))
    rollouts = rollouts_of((4, 3), [2, 3, 1, 4, 2, 1, 5])
    advantages = per_token(name, rewards, rollouts)
    assert not advantages[~rewards.valid].any()
    expected = per_token(name, *only(rewards.valid, rewards, rollouts))
    torch.testing.assert_close(advantages[rewards.valid], expected, rtol=1e-6, atol=1e-6)
    assert expected.any()


@pytest.mark.parametrize("name", BY_GROUP)
def test_fault_04_a_group_without_contrast_beside_others_gets_nothing(name: str) -> None:
    values = torch.tensor([0.35, 0.35, 0.35, 1.0, 0.0, 0.2, 0.7])
    rewards = replace(rewards_of(values), baselines=torch.tensor([0.35] * 3 + [0.5] * 4))
    advantages = per_token(name, rewards, rollouts_of((3, 3, 1), [1, 4, 2, 6, 1, 3, 2]))
    assert not advantages[:3].any()
    assert advantages[3:6].any()
    if name != "remax":  # a group of one has nothing to be compared with; the greedy response is something
        assert not advantages[6].any()


@pytest.mark.parametrize("name", [name for name in EVERY if name != "gdpo"])  # which looks at components only
def test_fault_04_with_a_kl_penalty_in_the_reward_equal_rewards_leave_the_penalty_alone(name: str) -> None:
    rollouts = rollouts_of((4, 3), [2, 3, 1, 4, 2, 1, 5])
    generator = torch.Generator().manual_seed(0)
    logprobs = {
        key: -torch.rand(rollouts.response_mask.shape, generator=generator) for key in ("old_logprobs", "ref_logprobs")
    }
    config = {"kl_coef": 0.5, "kl_place": "reward", "kl_estimator": "k1"}
    rewards = replace(rewards_of(torch.full((7,), 0.35)), baselines=torch.full((7,), 0.35))
    nothing = replace(rewards_of(torch.zeros(7)), baselines=torch.zeros(7))
    advantages = per_token(name, rewards, rollouts, config=config, **logprobs)
    assert advantages.any()
    expected = per_token(name, nothing, rollouts, config=config, **logprobs)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_fault_06_cut_off_responses_that_are_masked_are_as_if_never_drawn(name: str) -> None:
    rewards = rewards_of(torch.tensor([1.0, 9.0, 0.0, -7.0, 2.0, 4.0, 0.5]))
    rollouts = rollouts_of((4, 3), [2, 3, 1, 4, 2, 1, 5], truncated=(1, 3))
    advantages = per_token(name, rewards, rollouts, config={"mask_truncated": True})
    assert not advantages[rollouts.truncated].any()
    expected = per_token(name, *only(~rollouts.truncated, rewards, rollouts))
    torch.testing.assert_close(advantages[~rollouts.truncated], expected, rtol=1e-6, atol=1e-6)
    if name != "remax":  # which has no statistics that they could be in
        assert not torch.equal(per_token(name, rewards, rollouts)[~rollouts.truncated], expected)


@pytest.mark.parametrize("bad", [NAN, float("inf"), -1e30])
@pytest.mark.parametrize("name", EVERY)
def test_fault_08_what_stands_outside_of_the_mask_has_no_effect(name: str, bad: float) -> None:
    rollouts = rollouts_of((4, 3), [2, 3, 1, 4, 2, 1, 5])
    mask = rollouts.response_mask.clone()
    mask[3, 1] = mask[6, 2] = mask[6, 4] = False
    rollouts = replace(rollouts, response_mask=mask)
    rewards = rewards_of(torch.tensor([1.0, 0.5, 0.0, -1.0, 2.0, 4.0, 0.5]))
    generator = torch.Generator().manual_seed(1)
    names = ("values", "old_logprobs", "ref_logprobs")
    given = {key: -torch.rand(mask.shape, generator=generator) for key in names}
    spoilt = {key: torch.where(mask, matrix, bad) for key, matrix in given.items()}
    config = {"kl_coef": 0.1, "kl_place": "reward", "gamma": 0.9, "lam": 0.8}
    expected = per_token(name, rewards, rollouts, config=config, **given)
    assert torch.equal(per_token(name, rewards, rollouts, config=config, **spoilt), expected)
    assert not expected[~mask].any()
    assert expected.any()


@pytest.mark.parametrize("name", EVERY)
def test_fault_08_nothing_that_can_be_learned_from_gives_zero(name: str) -> None:
    rollouts = rollouts_of((2, 2), [2, 1, 3, 0])
    values = torch.tensor([1.0, 0.0, 3.0, 4.0])
    masked = replace(rollouts, response_mask=torch.zeros_like(rollouts.response_mask))
    assert not per_token(name, rewards_of(values), masked).any()
    nobody = torch.zeros(4, dtype=torch.bool)
    assert not per_token(name, rewards_of(torch.full((4,), NAN), nobody), rollouts).any()
    assert per_token(name, rewards_of(values), rollouts).any()


@pytest.mark.parametrize("name", EVERY)
def test_one_token_in_the_whole_step_gives_a_defined_number(name: str) -> None:
    rewards = replace(rewards_of(torch.tensor([3.0])), baselines=torch.tensor([3.0]))
    assert not per_token(name, rewards, rollouts_of((1,), [1])).any()
