"""Contract 2: the gradient of a mini-batch, and what is reported of it, do not depend on how it is computed.

Every loss with every aggregation and every KL estimator, in each packing, cut into 1, 2 and 4 micro-batches on each of
1 and 2 ranks. tests/unit/trainer/ has more ways to compute one loss: idle rows, chunks, checkpointing, 4 ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
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


PLAIN = Way("varlen", 1)
WAYS = [Way(packing, num_parts) for packing in ("auto", "shared_prefix", "varlen") for num_parts in (1, 2, 4)]
WAYS += [Way("none", None)]
TERMS: list[dict[str, Any]] = [
    {"kl_coef": 0.3, "kl_estimator": "k1"},
    {"kl_coef": 0.3, "kl_estimator": "k2"},
    {"kl_coef": 0.3, "kl_estimator": "k3"},
    {"entropy_coef": 0.1},
    {},
]
# Each loss sees every aggregation, with another term each, and over all of them every way.
CASES: list[tuple[Aggregation, dict[str, Any], list[Way]]] = [
    (aggregation, terms, WAYS[number::5])
    for number, (aggregation, terms) in enumerate(zip(AGGREGATIONS, TERMS, strict=True))
]


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
    losses = [(loss_of(name, batch, aggregation, terms), ways) for aggregation, terms, ways in CASES]
    cases = [(loss, way) for loss, ways in losses for way in ways]
    plain = gradients(ALONE, batch, [(loss, PLAIN) for loss, _ in losses])
    expected = [each for each, (_, ways) in zip(plain, losses, strict=True) for _ in ways]
    for found in (gradients(ALONE, batch, cases), ranks.run(gradients, 2, batch, cases)[0]):
        for (gradient, result), (expected_gradient, expected_result) in zip(found, expected, strict=True):
            assert expected_gradient.norm() > 1e-3, "without a gradient nothing is shown"
            assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-5
            assert_same(result, expected_result)
