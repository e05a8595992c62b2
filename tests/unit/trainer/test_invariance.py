"""Contract 2 in more ways: idle rows, chunks, checkpointing. tests/contract/test_invariance.py has every loss."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tandem.algorithm.losses import ClippedSurrogate
from tandem.algorithm.masked import AGGREGATIONS
from tandem.algorithm.protocols import Loss
from tandem.batch import UpdateResult
from tandem.trainer.packing import PackingOptions
from tandem.trainer.update import UpdateBatch, UpdateOptions
from tests.unit.trainer.made import KeepGradient, make_batch, make_rollouts, only_rows, run_update, trainee

LOGGED = ("loss", "kl", "entropy", "ratio_mean", "ratio_max", "clip_fraction", "grad_norm")
IDLE = (3, 4, 5)  # a whole group


@dataclass(frozen=True)
class Way:
    """One way to compute the same thing."""

    packing: str = "none"
    max_tokens: int = 10_000
    chunk_tokens: int = 1024
    checkpointing: bool = False
    skip_idle: bool = True


PLAIN = Way()
WAYS = {
    "auto": Way("auto"),
    "auto, small micro-batches": Way("auto", max_tokens=16),
    "shared prefix": Way("shared_prefix"),
    "shared prefix, groups cut": Way("shared_prefix", max_tokens=12),
    "varlen": Way("varlen"),
    "varlen, two micro-batches": Way("varlen", max_tokens=50),
    "varlen, a sequence longer than the budget": Way("varlen", max_tokens=4),
    "head in chunks of one token": Way("varlen", chunk_tokens=1),
    "head in chunks": Way("shared_prefix", chunk_tokens=7),
    "activation checkpointing": Way("auto", checkpointing=True),
    "everything at once": Way("shared_prefix", max_tokens=20, chunk_tokens=3, checkpointing=True),
}


def gradient_of(batch: UpdateBatch, loss: Loss, way: Way) -> tuple[Tensor, UpdateResult]:
    learner = trainee(chunk_tokens=way.chunk_tokens, checkpointing=way.checkpointing, keep_gradient=True)
    options = UpdateOptions(packing=PackingOptions(way.packing, way.max_tokens), skip_idle=way.skip_idle)
    result = run_update(learner, batch, loss, options)
    assert isinstance(learner.optimizer, KeepGradient)
    [gradient] = learner.optimizer.gradients
    assert gradient.norm() > 1e-3, "without a gradient nothing is shown"
    return gradient, result


def assert_same(batch: UpdateBatch, loss: Loss, way: Way) -> None:
    expected, expected_result = gradient_of(batch, loss, PLAIN)
    gradient, result = gradient_of(batch, loss, way)
    assert (gradient - expected).norm() / expected.norm() < 1e-5
    for name in LOGGED:
        value = vars(expected_result)[name]
        assert vars(result)[name] == (value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)), name
    for name, value in expected_result.metrics.items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    torch.testing.assert_close(result.logprobs, expected_result.logprobs, rtol=0, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(result.ratio, expected_result.ratio, rtol=1e-4, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_compute_a_mini_batch_gives_the_same_gradient(way: Way) -> None:
    """With all terms in the loss, holes in the mask, and idle rows."""
    loss = ClippedSurrogate(
        clip_dual=1.5, aggregation="sequence_mean", kl_coef=0.3, kl_estimator="k3", entropy_coef=0.1
    )
    batch = make_batch(make_rollouts(holes=True), idle=IDLE, reference=True)
    assert_same(batch, loss, way)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_fault_05_one_two_and_four_micro_batches(num_parts: int) -> None:
    """Responses of very different length: a mean of means would differ."""
    rollouts = make_rollouts(prompt_lengths=(4, 4, 4, 4), response_lengths=((1, 1), (2, 2), (9, 9), (25, 25)))
    tokens_in_all = sum(int(length) + 3 for length in rollouts.response_lengths)
    way = Way("varlen", max_tokens=-(-tokens_in_all // num_parts))
    assert_same(make_batch(rollouts), ClippedSurrogate(), way)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_idle_rows_count_in_the_denominators_whether_they_are_run_or_not(aggregation: str) -> None:
    loss = ClippedSurrogate(aggregation=aggregation, constant_length=20)
    batch = make_batch(make_rollouts(holes=True), idle=IDLE)
    expected, ran = gradient_of(batch, loss, Way(skip_idle=False))
    gradient, skipped = gradient_of(batch, loss, Way(skip_idle=True))
    assert (gradient - expected).norm() / expected.norm() < 1e-5
    assert skipped.loss == pytest.approx(ran.loss, rel=1e-5)
    assert skipped.grad_norm == pytest.approx(ran.grad_norm, rel=1e-5)
    assert bool(skipped.logprobs[list(IDLE)].isnan().all())
    assert not bool(ran.logprobs[list(IDLE)].isnan().any())


def test_fault_04_an_all_equal_group_gets_the_kl_gradient_and_nothing_else() -> None:
    rollouts = make_rollouts()
    batch = make_batch(rollouts, idle=range(len(rollouts)), reference=True)
    with_kl, result = gradient_of(batch, ClippedSurrogate(kl_coef=0.5), PLAIN)
    kl_only, _ = gradient_of(batch, ClippedSurrogate(kl_coef=0.5, clip_low=0.9, clip_high=9.0), PLAIN)
    doubled, _ = gradient_of(batch, ClippedSurrogate(kl_coef=1.0), PLAIN)
    torch.testing.assert_close(with_kl, kl_only)
    torch.testing.assert_close(doubled, 2 * with_kl)
    assert result.loss == pytest.approx(0.5 * result.kl, rel=1e-5)


def test_fault_04_an_all_equal_group_without_kl_has_exactly_no_gradient() -> None:
    rollouts = make_rollouts()
    for skip_idle in (True, False):
        learner = trainee()
        before = learner.vector()
        batch = make_batch(rollouts, idle=range(len(rollouts)))
        result = run_update(learner, batch, ClippedSurrogate(), UpdateOptions(skip_idle=skip_idle))
        assert torch.equal(learner.vector(), before)
        assert result.loss == 0.0
        assert result.grad_norm == 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_fault_06_truncated_responses_are_out_of_the_denominator(aggregation: str) -> None:
    """The same as if the cut-off response had never been there."""
    lengths = ((3, 6), (8, 4))
    rollouts = make_rollouts(prompt_lengths=(5, 4), response_lengths=lengths)
    assert rollouts.truncated.tolist() == [False, False, True, False]
    mask = rollouts.loss_mask(mask_truncated=True)
    loss = ClippedSurrogate(aggregation=aggregation, constant_length=20)
    masked, result = gradient_of(make_batch(rollouts, mask=mask), loss, Way("shared_prefix"))

    batch = make_batch(rollouts)
    kept = [0, 1, 3]
    alone = UpdateBatch(
        rollouts=only_rows(rollouts, kept),
        advantages=batch.advantages[kept],
        loss_mask=batch.loss_mask[kept],
        old_logprobs=batch.old_logprobs[kept],
        ref_logprobs=None,
    )
    expected, expected_result = gradient_of(alone, loss, PLAIN)
    assert (masked - expected).norm() / expected.norm() < 1e-5
    assert result.loss == pytest.approx(expected_result.loss, rel=1e-5)
    assert result.clip_fraction == pytest.approx(expected_result.clip_fraction)
