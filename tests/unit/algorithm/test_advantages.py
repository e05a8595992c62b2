"""Advantages of a step: from the config's section and what flows through the loop, or by a user's own function."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy
import pytest
import torch

from tandem.algorithm.advantages import ADVANTAGES, estimate_advantages, estimate_returns, idle_groups
from tandem.algorithm.group_advantages import (
    grpo_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from tandem.algorithm.kl import token_kl
from tandem.algorithm.token_advantages import (
    gae,
    gae_advantages,
    reinforce_plus_plus_advantages,
    remax_advantages,
    token_rewards,
)
from tandem.batch import Prompt, Response, Rewards, Rollouts
from tandem.config.algorithm import Advantage, AlgorithmConfig

NAN = float("nan")


def rollouts_of(finish_reasons, lengths):
    prompt = Prompt(tokens=(1,), text="p")
    responses = [
        Response(0, index, tokens=(5,) * length, logprobs=(-1.0,) * length, text="r", finish_reason=reason)
        for index, (reason, length) in enumerate(zip(finish_reasons, lengths, strict=True))
    ]
    return Rollouts.from_responses([prompt], responses)


REWARDS = Rewards(values=torch.tensor([1.0, 0.0, 4.0, 0.0]), valid=torch.tensor([True, True, True, False]))
ROLLOUTS = rollouts_of(["stop", "stop", "length", "stop"], [2, 1, 3, 2])


MASK = ROLLOUTS.response_mask & REWARDS.valid[:, None]
VALUES = torch.tensor([[0.1, 0.2, 9.0], [0.3, 9.0, 9.0], [0.4, 0.5, 0.6], [0.7, 0.8, 9.0]])
LOGPROBS = {"old_logprobs": -VALUES, "ref_logprobs": -VALUES.flip(0)}
BASELINES = torch.tensor([0.5, 0.5, 0.5, NAN])


def expected_of(config):
    """Each estimator by its own function, from what the step has for it."""
    rewards, group_ids, valid = REWARDS.values, ROLLOUTS.group_ids, REWARDS.valid
    on_tokens = token_rewards(rewards, MASK)
    return {
        "grpo": grpo_advantages(rewards, group_ids, valid=valid, normalize_std="batch"),
        "dr_grpo": grpo_advantages(rewards, group_ids, valid=valid),
        "rloo": rloo_advantages(rewards, group_ids, valid=valid),
        "reinforce_plus_plus": reinforce_plus_plus_advantages(on_tokens, MASK, gamma=0.9),
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline_advantages(rewards, group_ids, MASK, valid=valid),
        "remax": remax_advantages(on_tokens, MASK, BASELINES),
        "gae": gae_advantages(on_tokens, VALUES, MASK, gamma=0.9, lam=0.8),
    }[config.advantage]


def test_every_estimator_that_the_config_knows_is_there():
    assert set(ADVANTAGES) == set(get_args(Advantage))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_section_names_the_estimator_and_its_options(name):
    config = AlgorithmConfig(advantage=name, normalize_std="batch", gamma=0.9, lam=0.8)
    rewards = replace(REWARDS, baselines=BASELINES)
    advantages = estimate_advantages(config, rewards, ROLLOUTS, values=VALUES, **LOGPROBS)
    assert advantages.dtype == torch.float32
    assert not advantages.requires_grad
    assert torch.equal(advantages, expected_of(config))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_kl_penalty_comes_out_of_the_rewards(name, estimator):
    """The same as rewards that the penalty was taken out of by hand."""
    config = AlgorithmConfig(advantage=name, kl_place="reward", kl_coef=0.3, kl_estimator=estimator, gamma=0.9, lam=0.8)
    rewards = replace(REWARDS, baselines=BASELINES)
    advantages = estimate_advantages(config, rewards, ROLLOUTS, values=VALUES, **LOGPROBS)
    penalty = 0.3 * token_kl(LOGPROBS["old_logprobs"].double(), LOGPROBS["ref_logprobs"].double(), estimator)
    on_tokens = token_rewards(REWARDS.values, MASK, penalty)
    by_hand = {
        "reinforce_plus_plus": lambda: reinforce_plus_plus_advantages(on_tokens, MASK, gamma=0.9),
        "remax": lambda: remax_advantages(on_tokens, MASK, BASELINES),
        "gae": lambda: gae_advantages(on_tokens, VALUES, MASK, gamma=0.9, lam=0.8),
    }
    if name in by_hand:
        expected = by_hand[name]()
    else:
        less = replace(REWARDS, values=on_tokens.sum(dim=1))
        expected = estimate_advantages(AlgorithmConfig(advantage=name), less, ROLLOUTS)
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)
    without = estimate_advantages(config.model_copy(update={"kl_place": "loss"}), rewards, ROLLOUTS, values=VALUES)
    assert not torch.allclose(advantages, without, atol=1e-3)


def test_what_the_config_asks_for_must_be_there():
    in_reward = AlgorithmConfig(kl_place="reward", kl_coef=0.1)
    with pytest.raises(ValueError, match=r"kl_place=reward with algorithm.kl_coef=0.1 needs `old_logprobs`") as caught:
        estimate_advantages(in_reward, REWARDS, ROLLOUTS)
    # By default `trainer.old_logprobs` is None: what helps then is said, too.
    assert "rollouts.rollout_logprobs" in str(caught.value)
    assert "algorithm.old_logprobs=recompute" in str(caught.value)
    with pytest.raises(ValueError, match=r"needs `ref_logprobs`: pass trainer.ref_logprobs\(rollouts\)"):
        estimate_advantages(in_reward, REWARDS, ROLLOUTS, old_logprobs=LOGPROBS["old_logprobs"])
    with pytest.raises(ValueError, match=r"gae needs `values`: pass trainer.values\(rollouts\)"):
        estimate_advantages(AlgorithmConfig(advantage="gae"), REWARDS, ROLLOUTS)
    with pytest.raises(ValueError, match=r"algorithm.advantage=remax needs `rewards.baselines`"):
        estimate_advantages(AlgorithmConfig(advantage="remax"), REWARDS, ROLLOUTS)


def test_values_that_are_not_finite_are_an_error_where_they_count():
    values = torch.where(MASK, VALUES, NAN)
    advantages = estimate_advantages(AlgorithmConfig(advantage="gae"), REWARDS, ROLLOUTS, values=values)
    assert torch.equal(advantages, gae_advantages(token_rewards(REWARDS.values, MASK), VALUES, MASK))
    values[2, 1] = NAN
    with pytest.raises(ValueError, match=r"gae: `values` are not finite on some tokens.*critic\.lr.*critic\.path"):
        estimate_advantages(AlgorithmConfig(advantage="gae"), REWARDS, ROLLOUTS, values=values)


@pytest.mark.parametrize("name", ["gae", "grpo"])
def test_the_returns_of_a_step_are_those_of_gae_and_unknown_where_there_is_no_reward(name):
    """Also beside another advantage: a critic of one's own learns from them."""
    config = AlgorithmConfig(advantage=name, gamma=0.9, lam=0.8)
    returns = estimate_returns(config, REWARDS, ROLLOUTS, values=VALUES)
    _, expected = gae(token_rewards(REWARDS.values, MASK), VALUES, MASK, gamma=0.9, lam=0.8)
    assert torch.equal(returns[:3], expected[:3].float())
    assert returns[3].tolist() == pytest.approx([NAN, NAN, 0.0], nan_ok=True)
    with pytest.raises(ValueError, match=r"gae needs `values`"):
        estimate_returns(config, REWARDS, ROLLOUTS, values=None)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_own_advantage_function_gets_values_and_baselines_where_there_are_any(name):
    def own(*, rewards, baselines, values, response_mask, **_):
        assert torch.equal(values, torch.where(response_mask, VALUES, 0.0))
        return rewards[:, None] - baselines[:, None].nan_to_num() - values

    config, rewards = AlgorithmConfig(advantage=name), replace(REWARDS, baselines=BASELINES)
    spoilt = torch.where(MASK, VALUES, NAN)
    advantages = estimate_advantages(config, rewards, ROLLOUTS, values=spoilt, function=own)
    expected = REWARDS.values[:, None] - BASELINES[:, None] - VALUES
    assert torch.equal(advantages, torch.where(MASK, expected, 0.0))

    def alone(*, rewards, baselines, values, **_):
        assert baselines is None
        assert values is None
        return rewards

    assert estimate_advantages(config, REWARDS, ROLLOUTS, function=alone).tolist() == [1.0, 0.0, 4.0, 0.0]


def test_own_advantage_function_gets_components_and_the_penalized_rewards():
    components = {"right": torch.tensor([1.0, NAN, 0.0, 2.0])}

    def own(*, rewards, components, **_):
        return rewards + components["right"].nan_to_num()

    config = AlgorithmConfig(kl_place="reward", kl_coef=0.3, kl_estimator="k1")
    step = replace(REWARDS, components=components)
    advantages = estimate_advantages(config, step, ROLLOUTS, function=own, **LOGPROBS)
    penalty = (0.3 * (LOGPROBS["old_logprobs"] - LOGPROBS["ref_logprobs"]) * MASK).sum(dim=1)
    expected = torch.where(REWARDS.valid, REWARDS.values - penalty + torch.tensor([1.0, 0.0, 0.0, 2.0]), 0.0)
    torch.testing.assert_close(advantages, expected)


def test_the_section_decides_on_normalisation():
    plain = estimate_advantages(AlgorithmConfig(), REWARDS, ROLLOUTS)
    torch.testing.assert_close(plain, torch.tensor([-2.0 / 3, -5.0 / 3, 7.0 / 3, 0.0]))
    normalised = estimate_advantages(AlgorithmConfig(normalize_std="group"), REWARDS, ROLLOUTS)
    torch.testing.assert_close(normalised, plain / torch.tensor([1.0, 0.0, 4.0]).std(), rtol=1e-5, atol=0)


def test_masked_truncated_responses_do_not_move_the_mean_of_their_group():
    advantages = estimate_advantages(AlgorithmConfig(mask_truncated=True), REWARDS, ROLLOUTS)
    assert advantages.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_fault_19_empty_responses_do_not_move_the_mean_of_their_group():
    rollouts = rollouts_of(["stop", "stop", "stop", "stop"], [2, 1, 0, 2])
    assert estimate_advantages(AlgorithmConfig(), REWARDS, rollouts).tolist() == [0.5, -0.5, 0.0, 0.0]


def test_own_advantage_function_is_called_by_keyword_and_its_result_kept():
    def own(*, rewards, valid, response_mask, **_):
        assert valid.tolist() == [True, True, True, False]
        return (rewards * 2.0 + 1.0).double()[:, None].expand(response_mask.shape)

    advantages = estimate_advantages(AlgorithmConfig(), REWARDS, ROLLOUTS, function=own)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [[3.0, 3.0, 0.0], [1.0, 0.0, 0.0], [9.0, 9.0, 9.0], [0.0, 0.0, 0.0]]


def test_own_advantage_function_may_be_nonsense_where_there_is_no_reward():
    def own(*, rewards, valid, **_):
        return torch.where(valid, rewards, NAN)

    assert estimate_advantages(AlgorithmConfig(), REWARDS, ROLLOUTS, function=own).tolist() == [1.0, 0.0, 4.0, 0.0]


def test_own_advantage_function_with_a_wrong_shape_is_named():
    def too_short(*, rewards, **_):
        return rewards[:2]

    with pytest.raises(ValueError, match=r"too_short.* must return shape \(4,\) or \(4, 3\), it returned \(2,\)"):
        estimate_advantages(AlgorithmConfig(), REWARDS, ROLLOUTS, function=too_short)


@pytest.mark.parametrize("result", [[0.0] * 4, numpy.zeros(4), None])
def test_own_advantage_function_that_returns_no_tensor_is_named(result):
    def own(**_):
        return result

    with pytest.raises(ValueError, match=rf"own at .* must return a tensor, it returned a {type(result).__name__}"):
        estimate_advantages(AlgorithmConfig(), REWARDS, ROLLOUTS, function=own)


def test_what_own_advantage_function_does_in_place_changes_no_rollouts():
    rewards = replace(REWARDS, components={"format": torch.zeros(4)}, baselines=BASELINES.nan_to_num())
    of_responses = (rewards.values, rewards.valid, rewards.components["format"], rewards.baselines)
    given = (*of_responses, ROLLOUTS.group_ids, ROLLOUTS.response_mask, VALUES)
    before = [tensor.clone() for tensor in given]

    def own(*, rewards, valid, group_ids, response_mask, components, baselines, values):
        for tensor in (rewards, valid, group_ids, response_mask, components["format"], baselines, values):
            tensor.fill_(1)
        return rewards

    estimate_advantages(AlgorithmConfig(), rewards, ROLLOUTS, values=VALUES, function=own)
    assert all(map(torch.equal, given, before))


def test_own_advantage_function_that_returns_nan_is_named():
    def broken(*, rewards, **_):
        return rewards / 0.0

    with pytest.raises(ValueError, match=r"broken.* not finite"):
        estimate_advantages(AlgorithmConfig(), REWARDS, ROLLOUTS, function=broken)


def test_idle_groups_are_those_without_any_advantage():
    advantages = torch.tensor([0.5, 0.0, -0.5, 0.0, 0.0])
    expected = torch.tensor([False, False, False, True, True])
    group_ids = torch.tensor([4, 4, 4, 1, 1])
    assert torch.equal(idle_groups(advantages[:, None] * torch.tensor([0.0, 1.0, 0.0]), group_ids), expected)
