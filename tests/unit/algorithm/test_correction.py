"""Weights for tokens that were drawn from another distribution, held to plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.algorithm.correction import CORRECTIONS, Correction, CorrectionKind, check_correction, importance_ratio
from tandem.algorithm.losses import ClippedSurrogate, grpo_loss
from tandem.algorithm.masked import AGGREGATIONS, token_weights
from tandem.algorithm.mismatch import Mismatch

NAN, INF = float("nan"), float("inf")
RANGES: dict[CorrectionKind, tuple[float, float]] = {
    "none": (0.5, 1.5),
    "token_tis": (0.0, 1.5),
    "sequence_tis": (0.0, 1.5),
    "token_mask": (0.5, 1.5),
    "sequence_mask": (0.5, 1.5),
}
EVERY_KIND = pytest.mark.parametrize("kind", CORRECTIONS)


def correction_of(kind: CorrectionKind) -> Correction:
    return Correction(kind, *RANGES[kind])


def drawn(seed: int = 0, rows: int = 6, length: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Old and rollout log-probs in float64 with ratios on all sides of the range, and a mask with gaps."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=generator, dtype=torch.float64) - 0.1
    rollout = old + 0.4 * torch.randn(rows, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[0], mask[1] = True, False
    return old, rollout, mask


def by_hand(kind: CorrectionKind, old: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """One token after the other."""
    low, high = RANGES[kind]
    weights = torch.zeros_like(old)
    for row, column in mask.nonzero().tolist():
        columns = mask[row].nonzero().flatten().tolist() if kind.startswith("sequence") else [column]
        ratio = math.prod(math.exp(float(old[row, i]) - float(rollout[row, i])) for i in columns)
        if kind == "none":
            weight = 1.0
        elif kind.endswith("tis"):
            weight = min(ratio, high)
        else:
            weight = ratio if low <= ratio <= high else 0.0
        weights[row, column] = weight
    return weights


@EVERY_KIND
def test_weights_are_those_of_plain_arithmetic(kind: CorrectionKind) -> None:
    old, rollout, mask = drawn()
    weights = correction_of(kind)(old, rollout, mask)
    torch.testing.assert_close(weights, by_hand(kind, old, rollout, mask))
    if kind != "none":
        outside = correction_of(kind).outside(correction_of(kind).ratio(old, rollout, mask))
        assert 0 < outside[mask].sum() < mask.sum(), "the bounds are not tested"


@EVERY_KIND
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_gradient_are_those_of_an_independent_computation(kind: CorrectionKind, aggregation: str) -> None:
    """The weight multiplies the policy gradient's term, has no gradient itself, and is in no denominator."""
    old, rollout, mask = drawn()
    generator = torch.Generator().manual_seed(7)
    start = old + 0.3 * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    reference = old + 0.3 * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(old), 1, generator=generator, dtype=torch.float64)

    logprobs, old_logprobs = start.clone().requires_grad_(), old.clone().requires_grad_()
    loss = grpo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        aggregation=aggregation,
        constant_length=9,
        ref_logprobs=reference,
        kl_coef=0.2,
        kl_estimator="k2",
        correction=correction_of(kind)(old_logprobs, rollout, mask),
    )
    loss.backward()
    assert old_logprobs.grad is None

    plain = start.clone().requires_grad_()
    ratio = (plain - old).exp()
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    losses = by_hand(kind, old, rollout, mask) * surrogate + 0.2 * 0.5 * (plain - reference) ** 2
    expected = (token_weights(aggregation, mask, constant=9, dtype=torch.float64) * losses)[mask].sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logprobs.grad, plain.grad)
    assert logprobs.grad is not None
    assert logprobs.grad.norm() > 0.01


@EVERY_KIND
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_fault_08_what_stands_outside_of_the_mask_has_no_effect(kind: CorrectionKind, bad: float) -> None:
    old, rollout, mask = drawn()
    correction = correction_of(kind)
    expected = correction(old, rollout, mask)
    for poisoned_old, poisoned_rollout in ((bad, 0.0), (0.0, bad), (bad, bad)):
        weights = correction(torch.where(mask, old, poisoned_old), torch.where(mask, rollout, poisoned_rollout), mask)
        assert torch.equal(weights, expected)
    nothing = torch.zeros_like(mask)
    assert not correction(torch.full_like(old, bad), rollout, nothing).any()


@EVERY_KIND
@pytest.mark.parametrize("log_ratio", [50.0, -50.0, INF, -INF])
def test_fault_09_huge_log_ratios_give_a_finite_loss_and_gradient(kind: CorrectionKind, log_ratio: float) -> None:
    old = torch.full((2, 3), -1.0)
    rollout = old.clone()
    rollout[0, 1] -= log_ratio
    mask = torch.ones(2, 3, dtype=torch.bool)
    weights = correction_of(kind)(old, rollout, mask)
    assert weights.isfinite().all()
    assert weights.max() <= RANGES[kind][1]
    logprobs = old.clone().requires_grad_()
    grpo_loss(logprobs, old, torch.ones(2), mask, correction=weights).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("kind", CORRECTIONS[1:])
def test_a_log_prob_that_is_no_number_is_not_hidden(kind: CorrectionKind) -> None:
    """Within the mask: the loss is not finite either, and the update is left out and counted."""
    old, rollout = torch.full((1, 2), -1.0), torch.tensor([[-1.0, NAN]])
    assert correction_of(kind)(old, rollout, torch.ones(1, 2, dtype=torch.bool)).isnan().any()


@EVERY_KIND
def test_fault_12_where_both_agree_every_weight_is_exactly_1(kind: CorrectionKind) -> None:
    old, _, mask = drawn()
    for dtype in (torch.float32, torch.float64):
        weights = correction_of(kind)(old.to(dtype), old.to(dtype), mask)
        assert weights.dtype == dtype
        assert torch.equal(weights, mask.to(dtype))


def test_fault_13_the_ratio_of_a_sequence_is_the_exp_of_the_sum() -> None:
    old, mask = torch.full((1, 100), -1.0, dtype=torch.float64), torch.ones(1, 100, dtype=torch.bool)
    ratio = importance_ratio(old, old - 0.012, mask, by_sequence=True)
    torch.testing.assert_close(ratio, torch.full_like(old, math.exp(1.2)))
    assert Correction("sequence_tis", high=2.0)(old, old - 0.012, mask).unique().tolist() == [2.0]
    assert not Correction("sequence_mask", high=3.0)(old, old - 0.012, mask).any()
    assert Correction("sequence_mask", high=3.4)(old, old - 0.012, mask).min() == pytest.approx(math.exp(1.2))


@pytest.mark.parametrize("by_sequence", [False, True])
def test_a_ratio_is_engine_mismatch_times_staleness(by_sequence: bool) -> None:
    old, rollout, mask = drawn()
    sampling = rollout + 0.05 * torch.randn(old.shape, generator=torch.Generator().manual_seed(3), dtype=old.dtype)
    ratio, engine, staleness = (
        importance_ratio(one, other, mask, by_sequence=by_sequence)
        for one, other in ((old, rollout), (sampling, rollout), (old, sampling))
    )
    torch.testing.assert_close(ratio, engine * staleness)


def test_weights_correct_the_expectation() -> None:
    """Drawn from mu, weighted by pi / mu: the mean of a loss is that under pi. Without weights it is not.

    200,000 draws of one token out of four: a standard error of the mean of about 0.002.
    """
    pi = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    mu = torch.tensor([0.15, 0.3, 0.25, 0.3], dtype=torch.float64)
    values = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    tokens = torch.multinomial(mu, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))[:, None]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    weights = Correction("token_tis")(pi.log()[tokens], mu.log()[tokens], mask)
    expected = float((pi * values).sum())
    assert float((weights * values[tokens]).mean()) == pytest.approx(expected, abs=0.01)
    assert abs(float(values[tokens].mean()) - expected) > 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("token_mask", 0.5, 0.9), "must have 1 in it"),
        (("token_mask", 1.1, 2.0), "must have 1 in it"),
        (("token_mask", 1.0, 1.0), "must have 1 in it"),
        (("token_mask", NAN, 2.0), "must have 1 in it"),
        (("token_tis", -1.0, 2.0), "must have 1 in it"),
        (("sequence_tis", 0.5, 2.0), "acts above its range only"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(arguments: tuple[CorrectionKind, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Correction(*arguments)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown correction 'geometric'; choose one of none, token_tis"):
        check_correction("geometric")


# --- the mismatch itself ----------------------------------------------------------------------------------------------


def test_mismatch_against_plain_arithmetic() -> None:
    trainer, engine, mask = drawn()
    gaps = [float(trainer[row, column] - engine[row, column]) for row, column in mask.nonzero().tolist()]
    found = Mismatch.between(trainer, engine, mask, correction=Correction("token_mask", 0.9, 1.2)).metrics()
    assert found["mismatch/kl"] == pytest.approx(sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps))
    assert found["mismatch/logprob_diff_mean"] == pytest.approx(sum(map(abs, gaps)) / len(gaps))
    assert found["mismatch/logprob_diff_max"] == pytest.approx(max(map(abs, gaps)))
    assert found["mismatch/ratio_max"] == pytest.approx(math.exp(max(gaps)))
    outside = sum(not 0.9 <= math.exp(gap) <= 1.2 for gap in gaps)
    assert 0 < outside < len(gaps)
    assert found["mismatch/share_outside"] == outside / len(gaps)
    assert found["mismatch/staleness_kl"] == 0.0


def test_of_the_mismatch_of_a_stale_policy_the_age_is_told_apart() -> None:
    sampling, rollout, mask = drawn()
    old = sampling + 0.3
    alone = Mismatch.between(sampling, rollout, mask).metrics()
    found = Mismatch.between(sampling, rollout, mask, old_logprobs=old).metrics()
    assert found.pop("mismatch/staleness_kl") == pytest.approx(math.exp(0.3) - 1.3)
    alone.pop("mismatch/staleness_kl")
    assert found == alone


def test_fault_05_mismatches_of_parts_add_up() -> None:
    trainer, engine, mask = drawn()
    correction = Correction("sequence_mask", 0.9, 1.2)
    whole = Mismatch.between(trainer, engine, mask, old_logprobs=engine, correction=correction).metrics()
    parts = Mismatch()
    for rows in (slice(0, 1), slice(1, 2), slice(2, 6)):  # the second is empty
        parts = parts.plus(
            Mismatch.between(trainer[rows], engine[rows], mask[rows], old_logprobs=engine[rows], correction=correction)
        )
    assert parts.metrics() == pytest.approx(whole)
    assert Mismatch().metrics() == {}


def test_a_mismatch_of_float32_rounding_is_not_lost_in_rounding() -> None:
    """exp(d) - 1 - d in float32 would be 0 or negative; the divergence is d^2 / 2."""
    engine = torch.full((1, 4), -2.0)
    gap = float((engine + 1e-5 - engine)[0, 0])
    found = Mismatch.between(engine + 1e-5, engine, torch.ones(1, 4, dtype=torch.bool)).metrics()
    assert found["mismatch/kl"] == pytest.approx(gap**2 / 2, rel=1e-4)


def test_the_surrogate_takes_the_weights_of_any_caller() -> None:
    """A caller of its own may fold the correction into them; then it is of all terms."""
    old, rollout, mask = drawn()
    share = token_weights("token_mean", mask, dtype=torch.float64)
    correction = correction_of("token_mask")(old, rollout, mask)
    output = ClippedSurrogate()(
        logprobs=old, old_logprobs=old, advantages=torch.ones(6, 1), response_mask=mask, weights=share * correction
    )
    assert float(output.loss) == pytest.approx(-float(correction.sum()) / float(mask.sum()))
    assert float(output.metrics["ratio_mean"] / output.num_tokens) == 1.0
