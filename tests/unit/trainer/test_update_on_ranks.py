"""Contract 2 on several ranks: gradients, logged values and new weights are those of one rank, whatever runs where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.algorithm.function_loss import FunctionLoss
from tandem.algorithm.losses import ClippedSurrogate
from tandem.algorithm.masked import AGGREGATIONS, Aggregation
from tandem.algorithm.protocols import Loss
from tandem.batch import UpdateResult
from tandem.model.ranks import Ranks
from tandem.trainer.logprobs import batch_logprobs
from tandem.trainer.optim import Optimizer
from tandem.trainer.packing import Packing, PackingOptions
from tandem.trainer.supervised import answers_as_rollouts, supervised_update
from tandem.trainer.update import UpdateBatch, UpdateOptions, update_policy
from tests.ranks import RankProcesses
from tests.unit.trainer.made import (
    KeepGradient,
    Trainee,
    make_batch,
    make_rollouts,
    only_rows,
    run_update,
    trainee,
)
from tests.unit.trainer.spread import spread

LOGGED = ("loss", "kl", "entropy", "ratio_mean", "ratio_max", "clip_fraction", "grad_norm")
COUNTED = ("num_updates", "num_skipped", "policy_version")
IDLE = (3, 4, 5)  # a whole group
SIZES = pytest.mark.parametrize("size", [2, 4])
EVERY_TERM = ClippedSurrogate(
    clip_dual=1.5, aggregation="sequence_mean", kl_coef=0.3, kl_estimator="k3", entropy_coef=0.1
)

WAYS: list[tuple[Packing, int]] = [
    (packing, max_tokens) for packing in ("auto", "shared_prefix", "varlen", "none") for max_tokens in (16, 10_000)
]
CASES = [  # each aggregation with idle rows skipped and run, and between them every packing and budget
    (aggregation, skip_idle, *WAYS[(2 * number + (number + skip_idle) % 2) % len(WAYS)])
    for number, aggregation in enumerate(AGGREGATIONS)
    for skip_idle in (True, False)
]


@dataclass(frozen=True)
class Outcome:
    """What one rank has after an update; gradients and weights are those of all ranks, each as one vector."""

    result: UpdateResult
    gradients: list[Tensor]
    weights: Tensor


def spread_trainee(
    ranks: Ranks, *, body_dtype: torch.dtype = torch.float32, chunk_tokens: int = 1024, keep_gradient: bool = False
) -> Trainee:
    """On each rank its part of what `trainee` makes."""
    policy, weights = spread(ranks, trainee().model, body_dtype=body_dtype, chunk_tokens=chunk_tokens)
    optimizer = KeepGradient(weights) if keep_gradient else Optimizer(weights)
    return Trainee(policy.model, weights, policy, optimizer)


def joined(ranks: Ranks, learner: Trainee, vector: Tensor) -> Tensor:
    """A vector over this rank's part of the weights -> one over all weights, in the order that one rank has."""
    pieces = ranks.gather(vector.split([weight.numel() for weight in learner.weights.parameters()]))
    return torch.cat([torch.cat(of_one_weight) for of_one_weight in zip(*pieces, strict=True)])


def update_on(
    processes: RankProcesses,
    size: int,
    batch: UpdateBatch,
    loss: Loss,
    options: UpdateOptions,
    *,
    lr: float = 1e-3,
    **how: Any,
) -> list[Outcome]:
    """`run_update` on so many ranks; what each has then. `how` is for `spread_trainee`."""

    def update(ranks: Ranks) -> Outcome:
        learner = spread_trainee(ranks, **how)
        result = update_policy(
            learner.policy, learner.optimizer, batch, loss, options, ranks, lr=lr, seed=(0, 1), policy_version=1
        )
        kept = learner.optimizer.gradients if isinstance(learner.optimizer, KeepGradient) else []
        gradients = [joined(ranks, learner, gradient) for gradient in kept]
        return Outcome(result, gradients, joined(ranks, learner, learner.vector()))

    return processes.run(update, size)


def assert_same(found: UpdateResult, expected: UpdateResult, *, rel: float = 1e-4, logprob: float = 2e-5) -> None:
    for name in COUNTED:
        assert vars(found)[name] == vars(expected)[name], name
    for name in LOGGED:
        value = vars(expected)[name]
        assert vars(found)[name] == (value if value is None else pytest.approx(value, rel=rel, abs=1e-6)), name
    assert found.metrics == pytest.approx(dict(expected.metrics), rel=rel, abs=1e-6)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=logprob, equal_nan=True)
    torch.testing.assert_close(found.ratio, expected.ratio, rtol=rel, atol=logprob, equal_nan=True)


def assert_equal_on_all(outcomes: list[Outcome]) -> None:
    """To the bit: what ranks decide by must not differ."""
    first = vars(outcomes[0].result)
    for other in outcomes[1:]:
        for name, value in vars(other.result).items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(value, first[name], rtol=0, atol=0, equal_nan=True)
            else:
                assert value == first[name], name


def assert_same_gradient(
    ranks: RankProcesses, size: int, batch: UpdateBatch, loss: Loss, options: UpdateOptions, *, chunk_tokens: int = 1024
) -> None:
    """As of one rank that runs every sequence on its own, idle ones too where `options` say so."""
    one = trainee(keep_gradient=True)
    plain = UpdateOptions(PackingOptions("none"), skip_idle=options.skip_idle)
    expected_result = run_update(one, batch, loss, plain)
    assert isinstance(one.optimizer, KeepGradient)
    [expected] = one.optimizer.gradients
    assert expected.norm() > 1e-3, "without a gradient nothing is shown"
    outcomes = update_on(ranks, size, batch, loss, options, keep_gradient=True, chunk_tokens=chunk_tokens)
    assert_equal_on_all(outcomes)
    [gradient] = outcomes[0].gradients
    assert (gradient - expected).norm() / expected.norm() < 1e-5
    assert_same(outcomes[0].result, expected_result)


@SIZES
@pytest.mark.parametrize(("aggregation", "skip_idle", "packing", "max_tokens"), CASES)
def test_every_way_to_spread_a_mini_batch_gives_the_same_gradient(
    ranks: RankProcesses, size: int, aggregation: Aggregation, skip_idle: bool, packing: Packing, max_tokens: int
) -> None:
    loss = ClippedSurrogate(aggregation=aggregation, constant_length=20)
    options = UpdateOptions(PackingOptions(packing, max_tokens), skip_idle=skip_idle)
    assert_same_gradient(ranks, size, make_batch(make_rollouts(holes=True), idle=IDLE), loss, options)


@SIZES
def test_every_term_of_the_loss_and_a_head_in_chunks(ranks: RankProcesses, size: int) -> None:
    """Ranks have different numbers of chunks: nothing in the head may be a collective."""
    batch = make_batch(make_rollouts(holes=True), idle=IDLE, reference=True)
    assert_same_gradient(ranks, size, batch, EVERY_TERM, UpdateOptions(PackingOptions("auto", 30)), chunk_tokens=5)


@SIZES
@pytest.mark.parametrize("max_tokens", [30, 10_000])
def test_fault_05_28_very_different_lengths(ranks: RankProcesses, size: int, max_tokens: int) -> None:
    """One response as long as all others together: its rank has fewer micro-batches than the others."""
    rollouts = make_rollouts(prompt_lengths=(4, 4, 4, 4), response_lengths=((1, 1), (2, 2), (9, 9, 3), (60,)))
    options = UpdateOptions(PackingOptions("varlen", max_tokens))
    assert_same_gradient(ranks, size, make_batch(rollouts, reference=True), EVERY_TERM, options)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_fault_30_a_rank_without_rows_takes_part_and_does_not_call_the_loss(
    ranks: RankProcesses, num_rows: int
) -> None:
    """It reports the same metrics as the others, and an own loss need not know that there can be no rows."""

    def own_loss(*, logprobs: Tensor, advantages: Tensor, response_mask: Tensor, **_: object) -> Tensor:
        if not len(response_mask):
            raise ZeroDivisionError
        return -advantages * logprobs

    rollouts = only_rows(make_rollouts(), [0, 1, 2][:num_rows])
    assert_same_gradient(ranks, 4, make_batch(rollouts), FunctionLoss(own_loss), UpdateOptions())


def test_fault_28_a_loss_without_the_logprobs_on_one_rank_keeps_nobody_waiting(ranks: RankProcesses) -> None:
    """Users return such a zero where a micro-batch has nothing to teach."""

    def update(ranks: Ranks) -> float:
        def loss(*, logprobs: Tensor, weights: Tensor, **_: object) -> Tensor:
            return torch.zeros((), requires_grad=True) if ranks.rank == 1 else -(weights * logprobs).sum()

        learner = spread_trainee(ranks)
        options = UpdateOptions(packing=PackingOptions(max_tokens=10_000))
        return update_policy(
            learner.policy, learner.optimizer, make_batch(make_rollouts()), FunctionLoss(loss), options, ranks,
            lr=1e-3, seed=(0, 1), policy_version=1,
        ).grad_norm  # fmt: skip

    one, other = ranks.run(update, 2)
    assert one == other > 0


def test_without_an_active_row_no_rank_makes_a_step(ranks: RankProcesses) -> None:
    batch = make_batch(make_rollouts(), idle=range(12))
    outcomes = update_on(ranks, 2, batch, ClippedSurrogate(), UpdateOptions())
    one = trainee()
    expected = run_update(one, batch, ClippedSurrogate())
    assert_equal_on_all(outcomes)
    assert_same(outcomes[0].result, expected)
    assert expected.num_updates == 0
    assert torch.equal(outcomes[0].weights, one.vector())


@SIZES
def test_mini_batches_and_epochs_lead_to_the_same_weights(ranks: RankProcesses, size: int) -> None:
    """Six optimizer steps. Rows change their rank between epochs; the values reported are those of the last pass.

    AdamW divides by the size of the gradient, so where that is nearly 0 its last bits decide: weights have moved by up
    to 6 * lr, and are the same within a hundredth of that.
    """
    lr = 1e-3
    batch = make_batch(make_rollouts(holes=True), idle=IDLE, on_policy=True, reference=True)
    options = UpdateOptions(PackingOptions("auto", 20), mini_batch_responses=5, shuffle="responses", epochs=2)
    one = trainee()
    before = one.vector()
    expected = run_update(one, batch, EVERY_TERM, options, lr=lr)
    assert expected.num_updates == 6
    outcomes = update_on(ranks, size, batch, EVERY_TERM, options, lr=lr)
    assert_equal_on_all(outcomes)
    assert_same(outcomes[0].result, expected, rel=1e-3, logprob=1e-3)
    assert (one.vector() - before).abs().max() > lr
    torch.testing.assert_close(outcomes[0].weights, one.vector(), rtol=0, atol=0.05 * lr)


def test_fault_10_a_loss_that_is_not_finite_on_one_rank_makes_all_skip(ranks: RankProcesses) -> None:
    """Only the number is bad, no gradient: a rank that looked at its own part would take the step alone."""
    batch = make_batch(make_rollouts(), on_policy=True)
    poisoned = float(batch.advantages[0])

    def loss(*, logprobs: Tensor, advantages: Tensor, **_: object) -> Tensor:
        bad = torch.where(advantages == poisoned, float("nan"), 0.0)
        return -advantages * logprobs + bad

    outcomes = update_on(ranks, 2, batch, FunctionLoss(loss), UpdateOptions())
    assert_equal_on_all(outcomes)
    assert (outcomes[0].result.num_updates, outcomes[0].result.num_skipped) == (0, 1)
    assert torch.equal(outcomes[0].weights, trainee().vector())


@SIZES
@pytest.mark.parametrize("num_rows", [0, 1, 12])
def test_logprobs_of_all_rows_are_on_every_rank(ranks: RankProcesses, size: int, num_rows: int) -> None:
    rollouts = only_rows(make_rollouts(), range(num_rows))
    options = PackingOptions("auto", 20)

    def logprobs(ranks: Ranks) -> Tensor:
        return batch_logprobs(spread_trainee(ranks).policy, rollouts, options, ranks)

    expected = batch_logprobs(trainee().policy, rollouts, PackingOptions("none"))
    for found in ranks.run(logprobs, size):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@SIZES
def test_a_supervised_update_is_that_of_one_rank(ranks: RankProcesses, size: int) -> None:
    """Three examples: on four ranks one has none."""
    examples = answers_as_rollouts([[5, 6, 7, 8], [9], [5, 6, 7, 8]], [[10, 11, 1], [12, 13, 14, 15, 1], [1]])
    options = PackingOptions("auto", 8)

    def update(ranks: Ranks) -> tuple[float, Tensor]:
        learner = spread_trainee(ranks, keep_gradient=True)
        loss = supervised_update(learner.policy, learner.optimizer, examples, options, ranks, lr=1e-3)
        assert isinstance(learner.optimizer, KeepGradient)
        return loss, joined(ranks, learner, learner.optimizer.gradients[0])

    one = trainee(keep_gradient=True)
    expected_loss = supervised_update(one.policy, one.optimizer, examples, options, lr=1e-3)
    assert isinstance(one.optimizer, KeepGradient)
    [expected] = one.optimizer.gradients
    for loss, gradient in ranks.run(update, size):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert (gradient - expected).norm() / expected.norm() < 1e-5


def test_in_bfloat16_the_gradient_is_the_same_to_half_a_hundredth(ranks: RankProcesses) -> None:
    """A bfloat16 gradient is rounded, to 1 part in 256, once for each micro-batch: how it is cut shows."""
    batch = make_batch(make_rollouts(holes=True), idle=IDLE, reference=True)
    options = UpdateOptions(PackingOptions("auto", 30))
    one = trainee(keep_gradient=True, body_dtype=torch.bfloat16)
    expected_result = run_update(one, batch, EVERY_TERM, options)
    assert isinstance(one.optimizer, KeepGradient)
    [expected] = one.optimizer.gradients
    for size in (2, 4):
        [first, *_] = update_on(ranks, size, batch, EVERY_TERM, options, keep_gradient=True, body_dtype=torch.bfloat16)
        [gradient] = first.gradients
        assert (gradient - expected).norm() / expected.norm() < 5e-3  # found: 2e-3
        assert_same(first.result, expected_result, rel=1e-2, logprob=0.02)
