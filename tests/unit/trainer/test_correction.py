"""A correction in an update: with the right log-probs, and the same however the mini-batch is cut or spread."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.algorithm.correction import CORRECTIONS, Correction, CorrectionKind
from tandem.algorithm.function_loss import FunctionLoss
from tandem.algorithm.losses import ClippedSurrogate
from tandem.algorithm.protocols import Loss
from tandem.batch import UpdateResult
from tandem.trainer.logprobs import batch_logprobs
from tandem.trainer.packing import PackingOptions
from tandem.trainer.update import UpdateOptions
from tandem.trainer.update_batch import UpdateBatch
from tests.ranks import RankProcesses
from tests.unit.trainer.made import KeepGradient, make_batch, make_rollouts, run_update, trainee
from tests.unit.trainer.test_update_on_ranks import assert_equal_on_all, assert_same, update_on

IDLE = (3, 4, 5)  # a whole group
EVERY_TERM = ClippedSurrogate(clip_dual=1.5, aggregation="sequence_mean", kl_coef=0.3, entropy_coef=0.1)
EVERY_KIND = pytest.mark.parametrize("kind", CORRECTIONS[1:])
PLAIN = UpdateOptions(PackingOptions("none"))
NONE = Correction("none")


def mismatched(kind: CorrectionKind, *, on_policy: bool = False, reference: bool = False) -> UpdateBatch:
    """An engine whose log-probs are some way off the trainer's, so that the range acts on some tokens."""
    rollouts = make_rollouts(holes=True)
    logprobs = batch_logprobs(trainee().policy, rollouts, PackingOptions("none"))
    noise = 0.4 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(9))
    batch = make_batch(
        replace(rollouts, rollout_logprobs=logprobs + noise), idle=IDLE, on_policy=on_policy, reference=reference
    )
    low = 0.6 if kind.endswith("mask") else 0.0
    return replace(batch, correction=Correction(kind, low, 1.5))


def own_logprobs(batch: UpdateBatch) -> Tensor:
    """Under the policy that all of these updates begin with."""
    return batch_logprobs(trainee().policy, batch.rollouts, PackingOptions("none"))


def weights_of(batch: UpdateBatch) -> Tensor:
    """Of each token, by plain arithmetic."""
    old = own_logprobs(batch) if batch.old_logprobs is None else batch.old_logprobs
    log_ratio = torch.where(batch.loss_mask, old - batch.rollouts.rollout_logprobs, 0.0)
    if batch.correction.kind.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    ratio, low, high = log_ratio.exp(), batch.correction.low, batch.correction.high
    return ratio.clamp(max=high) if low == 0.0 else ratio * ((ratio >= low) & (ratio <= high))


def gradient_of(batch: UpdateBatch, loss: Loss, options: UpdateOptions = PLAIN) -> tuple[Tensor, UpdateResult]:
    one = trainee(keep_gradient=True)
    result = run_update(one, batch, loss, options)
    assert isinstance(one.optimizer, KeepGradient)
    [gradient] = one.optimizer.gradients
    return gradient, result


def assert_close(gradient: Tensor, expected: Tensor) -> None:
    assert expected.norm() > 1e-3, "without a gradient nothing is shown"
    assert (gradient - expected).norm() / expected.norm() < 1e-5


@EVERY_KIND
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_gradient_is_that_of_advantages_that_hold_the_weights(kind: CorrectionKind, on_policy: bool) -> None:
    """The surrogate is proportional to the advantage, and the terms of KL and entropy know nothing of it.

    On policy the old log-probs appear in the update only.
    """
    batch = mismatched(kind, on_policy=on_policy, reference=True)
    weights = weights_of(batch)
    weighted = replace(batch, advantages=batch.advantages * weights, correction=NONE)
    expected, _ = gradient_of(weighted, EVERY_TERM)
    gradient, result = gradient_of(batch, EVERY_TERM)
    assert_close(gradient, expected)
    without, _ = gradient_of(replace(batch, correction=NONE), EVERY_TERM)
    assert (gradient - without).norm() / without.norm() > 0.05, "the correction changes nothing"
    if on_policy:
        assert (result.ratio_mean, result.ratio_max) == (1.0, 1.0)  # fault 12


def test_a_loss_of_the_users_own_is_corrected_by_its_weights() -> None:
    batch = mismatched("token_mask")
    own = FunctionLoss(lambda *, logprobs, advantages, **_: -advantages * logprobs)
    summed = FunctionLoss(lambda *, logprobs, advantages, weights, **_: (-weights * advantages * logprobs).sum())
    expected, _ = gradient_of(replace(batch, advantages=batch.advantages * weights_of(batch), correction=NONE), own)
    for loss in (own, summed):
        assert_close(gradient_of(batch, loss)[0], expected)


@EVERY_KIND
def test_fault_05_cut_into_micro_batches_the_gradient_is_the_same(kind: CorrectionKind) -> None:
    batch = mismatched(kind, on_policy=kind.startswith("token"), reference=True)
    expected, expected_result = gradient_of(batch, EVERY_TERM)
    for packing in (PackingOptions("shared_prefix", 12), PackingOptions("varlen", 50), PackingOptions("auto")):
        gradient, result = gradient_of(batch, EVERY_TERM, UpdateOptions(packing))
        assert_close(gradient, expected)
        assert_same(result, expected_result)
    assert 0.0 < expected_result.metrics["mismatch/share_outside"] < 1.0


@EVERY_KIND
def test_fault_05_28_spread_over_ranks_the_gradient_is_the_same(ranks: RankProcesses, kind: CorrectionKind) -> None:
    """With other numbers of micro-batches on the ranks; old log-probs are those of the update, or given."""
    batch = mismatched(kind, on_policy=kind.startswith("sequence"), reference=True)
    expected, expected_result = gradient_of(batch, EVERY_TERM)
    options = UpdateOptions(PackingOptions("varlen", 30))
    outcomes = update_on(ranks, 2, batch, EVERY_TERM, options, keep_gradient=True)
    assert_equal_on_all(outcomes)
    [gradient] = outcomes[0].gradients
    assert_close(gradient, expected)
    assert_same(outcomes[0].result, expected_result)


@EVERY_KIND
def test_fault_12_with_an_exact_engine_a_correction_changes_nothing(kind: CorrectionKind) -> None:
    """To 1e-4, as engine and trainer differ in the last bits."""
    batch = mismatched(kind, on_policy=True)
    exact = replace(batch, rollouts=replace(batch.rollouts, rollout_logprobs=own_logprobs(batch)))
    gradient, result = gradient_of(exact, ClippedSurrogate())
    expected, _ = gradient_of(replace(exact, correction=NONE), ClippedSurrogate())
    assert (gradient - expected).norm() / expected.norm() < 1e-4
    assert result.metrics["mismatch/kl"] < 1e-10
    assert result.metrics["mismatch/share_outside"] == 0.0


@EVERY_KIND
def test_fault_08_10_log_probs_that_are_no_numbers(kind: CorrectionKind) -> None:
    """Outside of the mask they have no effect; inside of it the update is left out and counted."""
    batch = mismatched(kind, on_policy=True)

    def poisoned(where: Tensor) -> UpdateBatch:
        rollout = batch.rollouts.rollout_logprobs.masked_fill(where, float("nan"))
        return replace(batch, rollouts=replace(batch.rollouts, rollout_logprobs=rollout))

    expected, _ = gradient_of(batch, ClippedSurrogate())
    gradient, _ = gradient_of(poisoned(~batch.loss_mask), ClippedSurrogate())
    assert torch.equal(gradient, expected)
    one = trainee()
    before = one.vector()
    result = run_update(one, poisoned(batch.loss_mask), ClippedSurrogate())
    assert (result.num_updates, result.num_skipped) == (0, 1)
    assert torch.equal(one.vector(), before)


def test_the_mismatch_is_that_of_the_weights_that_sampled() -> None:
    """Over all mini-batches where a correction comes with old log-probs of the trainer's own; else of the first one."""
    options = UpdateOptions(PackingOptions("none"), mini_batch_responses=6, shuffle="none")
    batch = replace(make_batch(mismatched("token_mask").rollouts, on_policy=True), correction=Correction("token_mask"))
    gap = (own_logprobs(batch) - batch.rollouts.rollout_logprobs).abs()
    for correction, rows in ((batch.correction, slice(0, 12)), (NONE, slice(0, 6))):
        result = run_update(trainee(), replace(batch, correction=correction), ClippedSurrogate(), options, lr=0.1)
        expected = gap[rows][batch.loss_mask[rows]]
        assert result.num_updates == 2
        assert result.metrics["mismatch/logprob_diff_mean"] == pytest.approx(float(expected.mean()), rel=1e-4)
        assert result.metrics["mismatch/logprob_diff_max"] == pytest.approx(float(expected.max()), rel=1e-4)


def test_the_mismatch_to_a_policy_that_is_gone_is_measured_where_its_log_probs_are_given() -> None:
    """Never taken for the mismatch: the distance to a policy that has moved on."""
    batch = mismatched("token_tis")
    stale = replace(batch, rollouts=replace(batch.rollouts, policy_version=-1))
    _, unknown = gradient_of(stale, ClippedSurrogate())
    assert not any(name.startswith("mismatch/") for name in unknown.metrics)
    sampling = batch.rollouts.rollout_logprobs + 0.01
    _, known = gradient_of(replace(stale, sampling_logprobs=sampling), ClippedSurrogate())
    assert known.metrics["mismatch/logprob_diff_mean"] == pytest.approx(0.01, rel=1e-3)
    assert known.metrics["mismatch/logprob_diff_max"] == pytest.approx(0.01, rel=1e-3)
    assert known.metrics["mismatch/staleness_kl"] > 0.01


def test_fault_22_nothing_is_corrected_by_log_probs_of_a_cut_distribution() -> None:
    batch = mismatched("token_tis")
    cut = replace(batch.rollouts, cut_logprobs=True)
    with pytest.raises(ValueError, match=r"set algorithm\.correction=none, or sample without top_p and top_k"):
        replace(batch, rollouts=cut)
    _, result = gradient_of(replace(batch, rollouts=cut, correction=NONE), ClippedSurrogate())
    assert result.num_updates == 1
    assert not any(name.startswith("mismatch/") for name in result.metrics)
