"""Agreement of advantages with verl 0.9.1 on recorded values: the family `adv/`, in the tables of test_verl_vectors.py.

Two kinds of difference run through all of them: verl keeps the raw reward of a group of one as its advantage, and in
float32 it leaves a residue where rewards are equal.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from examples.losses.grpo_passk import grpo_passk
from examples.losses.opo import opo
from tandem.algorithm.group_advantages import (
    grpo_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from tandem.algorithm.groups import Groups
from tandem.algorithm.token_advantages import gae, reinforce_plus_plus_advantages
from tandem.algorithm.whitening import whiten
from tests.parity.verl import CLOSE, CLOSE_FLOAT32, GROUP_IDS, MASK, VECTORS, batch, family, literal, same_group, tensor

SINGLETON = GROUP_IDS == 2
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]  # rewards [B], group_ids [B], mask [B, L] -> [B, L]


def grpo(normalize_std: bool) -> Estimator:
    return lambda rewards, group_ids, mask: (
        grpo_advantages(rewards, group_ids, normalize_std=normalize_std)[:, None] * mask
    )


def rloo(rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    return rloo_advantages(rewards, group_ids)[:, None] * mask


def example(function: Callable[..., Tensor]) -> Estimator:
    def estimator(rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        valid = torch.ones_like(group_ids, dtype=torch.bool)
        advantages = function(rewards=rewards, valid=valid, group_ids=group_ids, response_mask=mask)
        return advantages[:, None].float() * mask

    return estimator


def outcome(vector: dict) -> Tensor:
    return tensor(vector["output"]["advantages"]).float()


# --- the same value ---------------------------------------------------------------------------------------------------


def on_the_batch(estimator: Estimator) -> Callable[[dict], None]:
    def check(vector: dict) -> None:
        rows = literal(vector).get("rows", list(range(8)))
        ours = estimator(batch("scores")[rows], GROUP_IDS[rows], MASK[rows])
        torch.testing.assert_close(ours, outcome(vector), **CLOSE_FLOAT32)

    return check


def on_one_group(estimator: Estimator) -> Callable[[dict], None]:
    """Responses of one token, rewards in float32."""

    def check(vector: dict) -> None:
        torch.testing.assert_close(estimator(*one_group(vector)), outcome(vector), **CLOSE_FLOAT32)

    return check


def one_group(vector: dict) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.tensor(literal(vector)["scores"], dtype=torch.float32)
    group_ids = torch.zeros(len(scores), dtype=torch.int64)
    return scores, group_ids, torch.ones(len(scores), 1, dtype=torch.bool)


def reinforce_plus_plus(vector: dict) -> None:
    gamma = literal(vector)["gamma"]
    rewards = batch("token_level_rewards")
    _, returns = gae(rewards, torch.zeros_like(rewards), MASK, gamma=gamma)
    torch.testing.assert_close(returns, tensor(vector["output"]["returns"]), **CLOSE)
    ours = reinforce_plus_plus_advantages(rewards, MASK, gamma=gamma)
    torch.testing.assert_close(ours, outcome(vector), **CLOSE_FLOAT32)


MATCHES: dict[str, Callable[[dict], None]] = {
    "adv/EDGE grpo identical rewards 0.7 x3@f32": on_one_group(grpo(True)),
    "adv/EDGE grpo identical rewards 0.1 x6@f32": on_one_group(grpo(True)),
    "adv/EDGE grpo_vectorized identical rewards 0.1 x6@f32": on_one_group(grpo(True)),
    "adv/EDGE grpo one-hot rewards 1,0,0,0@f32": on_one_group(grpo(True)),
    "adv/rloo_vectorized": on_the_batch(rloo),
    "adv/EDGE rloo identical rewards 0.7 x3@f32": on_one_group(rloo),
    "adv/EDGE rloo_vectorized identical rewards 0.7 x3@f32": on_one_group(rloo),
    "adv/EDGE rloo identical rewards 0.1 x6@f32": on_one_group(rloo),
    "adv/reinforce_plus_plus gamma=1.0": reinforce_plus_plus,
    "adv/EDGE reinforce_plus_plus_baseline one-hot rewards 1,0,0,0@f32": on_one_group(
        reinforce_plus_plus_baseline_advantages
    ),
    "adv/EDGE opo one-hot rewards 1,0,0,0@f32": on_one_group(example(opo)),
    "adv/grpo_passk norm=False rows without singleton": on_the_batch(example(grpo_passk)),
}


# --- where verl is wrong ----------------------------------------------------------------------------------------------


def group_of_one(estimator: Estimator) -> Callable[[dict], None]:
    def check(vector: dict) -> None:
        """verl keeps the raw reward of a group of one as its advantage; there is nothing to compare it with, so 0."""
        ours, theirs = estimator(batch("scores"), GROUP_IDS, MASK), outcome(vector)
        assert not ours[SINGLETON].any()
        assert theirs[SINGLETON].max().item() == pytest.approx(0.5, rel=1e-5)
        torch.testing.assert_close(ours[~SINGLETON], theirs[~SINGLETON], **CLOSE_FLOAT32)

    return check


def group_of_one_in_statistics(vector: dict) -> None:
    """The raw reward of a group of one also moves verl's mean and standard deviation, so every other advantage."""
    groups = Groups.of(batch("scores"), GROUP_IDS, None)
    as_verl = torch.where(SINGLETON, groups.rewards, groups.centred())[:, None].expand(MASK.shape)
    torch.testing.assert_close(whiten(as_verl, MASK), tensor(vector["output"]["advantages"]), **CLOSE)
    ours = reinforce_plus_plus_baseline_advantages(batch("scores"), GROUP_IDS, MASK)
    assert not ours[SINGLETON].any()
    expected = whiten(groups.centred()[:, None].expand(MASK.shape), MASK).float()
    torch.testing.assert_close(ours[~SINGLETON], expected[~SINGLETON], **CLOSE_FLOAT32)


def alone_in_training_for_pass_at_k(vector: dict) -> None:
    """verl ends the run over a group of one, which an invalid reward makes of a larger one at any time."""
    assert "Got 1 for group c" in vector["raises"]
    ours = example(grpo_passk)(batch("scores"), GROUP_IDS, MASK)
    assert not ours[SINGLETON].any()
    assert ours[~SINGLETON].any()


def residue_of_equal_rewards(estimator: Estimator, least: float) -> Callable[[dict], None]:
    def check(vector: dict) -> None:
        """In float32 the mean of equal rewards is off by a bit, which division by a tiny deviation makes 0.029; it is
        0, and a group without any advantage need not be run."""
        assert not estimator(*one_group(vector)).any()
        assert outcome(vector).abs().min() > least

    return check


def masked_row_in_statistics(vector: dict) -> None:
    """The reward of a fully masked row counts in verl's mean of the group, whose other rows then do not sum to 0."""
    row = literal(vector)["mask_row_zeroed"]
    valid = torch.arange(8) != row
    ours = grpo_advantages(batch("scores"), GROUP_IDS, valid=valid, normalize_std="group")
    theirs = outcome(vector)[:, 0]
    others = same_group(row) & valid
    assert batch("scores")[others].tolist() == [0.0, 0.0, 0.0]
    assert ours[others].tolist() == [0.0, 0.0, 0.0]
    assert theirs[others].tolist() == pytest.approx([-0.5] * 3, rel=1e-5)
    untouched = GROUP_IDS == 0
    torch.testing.assert_close(ours[untouched], theirs[untouched], **CLOSE_FLOAT32)


def nan_reward(vector: dict) -> None:
    """One NaN makes verl's whole group NaN. Here it is an error, or, marked as invalid, left out of its group."""
    row, _ = literal(vector)["nan_at"]
    rewards = batch("scores")
    rewards[row] = torch.nan
    theirs = outcome(vector)[:, 0]
    assert theirs[same_group(row)].isnan().all()
    with pytest.raises(ValueError, match=rf"\[{row}\] are not finite"):
        grpo_advantages(rewards, GROUP_IDS, normalize_std="group")
    ours = grpo_advantages(rewards, GROUP_IDS, valid=rewards.isfinite(), normalize_std="group")
    assert ours[row] == 0.0
    others = same_group(row) & rewards.isfinite()
    centred = rewards[others] - rewards[others].mean()
    torch.testing.assert_close(ours[others], (centred / rewards[others].std()).float(), rtol=1e-5, atol=0)
    untouched = GROUP_IDS == 0
    torch.testing.assert_close(ours[untouched], theirs[untouched], **CLOSE_FLOAT32)


DIFFERS: dict[str, Callable[[dict], None]] = {
    "adv/grpo norm=True": group_of_one(grpo(True)),
    "adv/grpo norm=False": group_of_one(grpo(False)),
    "adv/grpo_vectorized norm=True": group_of_one(grpo(True)),
    "adv/grpo_vectorized norm=False": group_of_one(grpo(False)),
    "adv/rloo": group_of_one(rloo),
    "adv/opo": group_of_one(example(opo)),
    "adv/reinforce_plus_plus_baseline": group_of_one_in_statistics,
    "adv/grpo_passk singleton raises": alone_in_training_for_pass_at_k,
    "adv/EDGE grpo identical rewards 0.333 x7@f32": residue_of_equal_rewards(grpo(True), 0.02),
    "adv/EDGE grpo_vectorized identical rewards 0.35 x8@f32": residue_of_equal_rewards(grpo(True), 0.02),
    "adv/EDGE rloo identical rewards 0.35 x8@f32": residue_of_equal_rewards(rloo, 3e-8),
    "adv/EDGE rloo_vectorized identical rewards 0.35 x8@f32": residue_of_equal_rewards(rloo, 3e-8),
    "adv/EDGE rloo identical rewards 0.333 x7@f32": residue_of_equal_rewards(rloo, 3e-8),
    "adv/EDGE rloo_vectorized identical rewards 0.333 x7@f32": residue_of_equal_rewards(rloo, 3e-8),
    "adv/EDGE grpo row 3 fully masked": masked_row_in_statistics,
    "adv/EDGE grpo one NaN reward poisons its group only": nan_reward,
}

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "these need the sum of the squared probabilities of all tokens at each position, which no pass here computes": (
        *family("adv/optimal_token_baseline"),
        *family("adv/tir_optimal_token_baseline"),
    ),
}


@pytest.mark.parametrize("name", MATCHES)
def test_same_value_as_verl(name):
    MATCHES[name](VECTORS[name])


@pytest.mark.parametrize("name", DIFFERS)
def test_differs_from_verl_for_a_reason(name):
    assert DIFFERS[name].__doc__
    DIFFERS[name](VECTORS[name])


def test_each_vector_is_in_exactly_one_table():
    listed = [*MATCHES, *DIFFERS, *(name for names in ELSEWHERE.values() for name in names)]
    assert sorted(listed) == sorted(family("adv/"))
