"""Contract 2: the gradient of a mini-batch, and what is reported of it, do not depend on how it is computed.

Every loss with every aggregation, the surrogates also with every KL estimator and with entropy in each of them, is
computed sequence by sequence on one rank, and again in two other ways: on one rank and on two. Over the pairs of
aggregation and term, packings and numbers of micro-batches take turns, from another one for each loss: with the
surrogates every aggregation and every term meets all of them. tests/unit/trainer/ has more ways to compute one loss:
idle rows, chunks, checkpointing, 4 ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import Tensor

from tandem.algorithm.correction import Correction
from tandem.algorithm.masked import AGGREGATIONS, Aggregation
from tandem.algorithm.protocols import Loss
from tandem.batch import UpdateResult
from tandem.model.ranks import ALONE, Ranks
from tandem.trainer.balance import rank_micro_batches
from tandem.trainer.packing import Packing, PackingOptions
from tandem.trainer.update import UpdateBatch, UpdateOptions, update_policy
from tests.every_loss import LOSSES, SURROGATES, make_loss
from tests.ranks import RankProcesses
from tests.unit.trainer.made import KeepGradient, Trainee, make_batch, make_rollouts, trainee
from tests.unit.trainer.test_update_on_ranks import assert_same, joined, spread_trainee


@dataclass(frozen=True)
class Way:
    """How each rank cuts its rows."""

    packing: Packing
    num_parts: int | None  # None: one for each sequence


PLAIN = Way("none", None)
WAYS = [Way(packing, num_parts) for packing in ("auto", "shared_prefix", "varlen") for num_parts in (1, 2, 4)]
TERMS: list[dict[str, Any]] = [
    {"kl_coef": 0.3, "kl_estimator": "k1"},
    {"kl_coef": 0.3, "kl_estimator": "k2"},
    {"kl_coef": 0.3, "kl_estimator": "k3"},
    {"entropy_coef": 0.1},
    {},
]


def pairs_of(name: str) -> list[tuple[Aggregation, dict[str, Any]]]:
    """A loss of one's own takes no terms: it sees every aggregation twice."""
    return list(itertools.product(AGGREGATIONS, TERMS if name in SURROGATES else ({}, {})))


def ways_of(name: str, size: int) -> Iterator[Way]:
    """On so many ranks, one for each pair of aggregation and term."""
    return itertools.islice(itertools.cycle(WAYS), LOSSES.index(name) + 7 * (size - 1), None)


def whole_batch() -> UpdateBatch:
    """Four groups of responses of very different length, holes in the mask, an engine that is some way off."""
    batch = make_batch(make_rollouts(holes=True), reference=True)
    rollouts = replace(batch.rollouts, rollout_logprobs=batch.ref_logprobs)
    return replace(batch, rollouts=rollouts, correction=Correction("token_tis", high=1.2))


def loss_of(name: str, batch: UpdateBatch, aggregation: Aggregation, terms: dict[str, Any]) -> Loss:
    return make_loss(
        name,
        aggregation,
        advantages=batch.advantages,
        old_logprobs=batch.old_logprobs,
        response_mask=batch.loss_mask,
        **(terms if name in SURROGATES else {}),
    )


def options_of(learner: Trainee, batch: UpdateBatch, way: Way, ranks: Ranks) -> UpdateOptions:
    """With the smallest budget that makes so many micro-batches."""
    rows, costs = range(len(batch.rollouts)), learner.policy.costs()
    for max_tokens in range(1, 200):
        options = PackingOptions(way.packing, max_tokens)
        num_parts = len(rank_micro_batches(batch.rollouts, rows, options, costs, ranks))
        if way.num_parts in (num_parts, None):
            return UpdateOptions(options)
    raise AssertionError(f"no budget makes {way}")


def gradients(ranks: Ranks, batch: UpdateBatch, cases: Sequence[tuple[Loss, Way]]) -> list[tuple[Tensor, UpdateResult]]:
    """Of each case, with the same weights: no update changes them."""
    learner = trainee(keep_gradient=True) if ranks.alone else spread_trainee(ranks, keep_gradient=True)
    found = []
    for loss, way in cases:
        options = options_of(learner, batch, way, ranks)
        result = update_policy(
            learner.policy, learner.optimizer, batch, loss, options, ranks, lr=0.0, seed=(0, 1), policy_version=1
        )
        assert isinstance(learner.optimizer, KeepGradient)
        gradient = learner.optimizer.gradients.pop()
        found.append((gradient if ranks.alone else joined(ranks, learner, gradient), result))
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_fault_05_gradient_and_metrics_do_not_depend_on_cut_packing_and_ranks(ranks: RankProcesses, name: str) -> None:
    batch = whole_batch()
    losses = [loss_of(name, batch, *pair) for pair in pairs_of(name)]
    expected = gradients(ALONE, batch, [(loss, PLAIN) for loss in losses])
    one, two = (list(zip(losses, ways_of(name, size), strict=False)) for size in (1, 2))
    for found in (gradients(ALONE, batch, one), ranks.run(gradients, 2, batch, two)[0]):
        for (gradient, result), (expected_gradient, expected_result) in zip(found, expected, strict=True):
            assert expected_gradient.norm() > 1e-3, "without a gradient nothing is shown"
            assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-5
            assert_same(result, expected_result)


def test_every_aggregation_and_every_term_meets_every_way() -> None:
    for number in (0, 1):  # of a pair: its aggregation, its term
        met = {
            (str(pair[number]), way)
            for name in SURROGATES
            for size in (1, 2)
            for pair, way in zip(pairs_of(name), ways_of(name, size), strict=False)
        }
        assert len(met) == 5 * len(WAYS)
