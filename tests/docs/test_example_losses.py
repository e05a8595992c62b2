"""Each loss of examples/losses/ in a training step of a tiny model, as its file says to use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import tandem as td
from examples.losses.adaptive_kl import AdaptiveKl
from examples.losses.clip_cov import clip_cov
from examples.losses.dppo import binary_kl, dppo
from examples.losses.gmpo import gmpo
from examples.losses.gpg import gpg
from examples.losses.kl_cov import kl_cov
from examples.losses.sapo import sapo
from tandem.algorithm.protocols import Loss, LossFunction
from tests.docs.pages import ROOT
from tests.unit.hybrid.made import contrast, rollout, start_tiny


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[td.Workers, td.Rollouts]]:
    """Workers whose learning rate is so small that every test finds the weights that wrote the rollouts."""
    with start_tiny(tmp_path_factory.mktemp("models") / "tiny", lr=1e-12) as workers:
        yield workers, rollout(workers)


def update(
    step: tuple[td.Workers, td.Rollouts], loss: Loss | LossFunction, advantages: torch.Tensor | None = None
) -> td.UpdateResult:
    workers, rollouts = step
    advantages = contrast(rollouts) if advantages is None else advantages
    with workers.train_phase() as trainer:
        return trainer.update(rollouts, advantages, rollouts.rollout_logprobs, loss=loss)


@pytest.mark.parametrize(
    ("loss", "plain"),
    [
        (gpg, td.ClippedSurrogate()),
        (td.FunctionLoss(gpg, aggregation="sequence_sum"), td.ClippedSurrogate(aggregation="sequence_sum")),
        (td.FunctionLoss(gmpo, aggregation="sequence_mean"), td.ClippedSurrogate(aggregation="sequence_mean")),
        (td.FunctionLoss(sapo, aggregation="sequence_mean"), td.ClippedSurrogate(aggregation="sequence_mean")),
        (dppo, td.ClippedSurrogate()),
        (partial(dppo, divergence=binary_kl, low=0.05, high=0.05), td.ClippedSurrogate()),
    ],
    ids=["gpg", "reinforce", "gmpo", "sapo", "dppo", "dppo_kl"],
)
def test_on_policy_every_example_is_the_policy_gradient(
    step: tuple[td.Workers, td.Rollouts], loss: Loss | LossFunction, plain: Loss
) -> None:
    """As is the clipped surrogate. To 1e-3, as ratios to what the engine kept are 1 to 1e-5."""
    found, expected = update(step, loss), update(step, plain)
    assert found.num_updates == 1
    assert expected.grad_norm > 0.01
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)


def test_clip_cov_takes_the_gradient_of_some_tokens(step: tuple[td.Workers, td.Rollouts]) -> None:
    rollouts = step[1]
    mask, plain = rollouts.response_mask, contrast(rollouts)
    advantages = clip_cov(plain, rollouts.rollout_logprobs, mask, share=0.2, low=0.1, high=5.0, seed=1)
    assert (mask & advantages.eq(0.0)).sum() == int(0.2 * int(mask.sum()))
    assert torch.equal(advantages[advantages.ne(0.0)], plain[:, None].expand_as(advantages)[advantages.ne(0.0)])
    again = clip_cov(plain, rollouts.rollout_logprobs, mask, share=0.2, low=0.1, high=5.0, seed=2)
    assert not torch.equal(again, advantages)
    found, expected = (update(step, td.ClippedSurrogate(), each) for each in (advantages, plain))
    assert found.num_updates == 1
    assert found.grad_norm != pytest.approx(expected.grad_norm, rel=0.01)


def test_kl_cov_adds_a_penalty_and_no_more(step: tuple[td.Workers, td.Rollouts]) -> None:
    rollouts = step[1]
    plain = update(step, td.ClippedSurrogate())
    for coef, same in ((0.0, True), (1.0, False)):
        loss = kl_cov(contrast(rollouts), rollouts.rollout_logprobs, rollouts.response_mask, share=0.1, coef=coef)
        result = update(step, loss)
        assert result.num_updates == 1
        assert (result.grad_norm == pytest.approx(plain.grad_norm, rel=1e-3)) == same


@pytest.mark.parametrize("function", [clip_cov, kl_cov])
def test_a_step_without_a_token_is_no_error(function: object) -> None:
    """Fault 19: all responses of a step are empty, or invalid."""
    nothing = torch.zeros(4, 3, dtype=torch.bool)
    logprobs = torch.full((4, 3), float("nan"))
    made = function(torch.ones(4), logprobs, nothing)
    result = made if function is clip_cov else made(
        logprobs=torch.zeros(4, 3), old_logprobs=torch.zeros(4, 3), advantages=torch.zeros(4, 3)
    )  # fmt: skip
    assert torch.equal(result.abs(), torch.zeros(4, 3))


def test_adaptive_kl_follows_the_kl_in_bounded_steps(step: tuple[td.Workers, td.Rollouts]) -> None:
    workers, rollouts = step
    kl_coef = AdaptiveKl(coef=0.05, target=0.02)
    with workers.train_phase() as trainer:
        reference = trainer.ref_logprobs(rollouts) - 0.1  # a policy that has moved away: k3 = exp(-0.1) - 0.9
        result = trainer.update(rollouts, contrast(rollouts), ref_logprobs=reference, loss=kl_coef.loss())
    assert result.kl == pytest.approx(0.004837, rel=1e-2)
    kl_coef.follow(result)
    assert kl_coef.coef == pytest.approx(0.05 * (1 - 0.1 * 0.2))  # 76 % below the target, cut to 20
    assert kl_coef.loss().kl_coef == kl_coef.coef
    for kl, change in ((0.022, 1.01), (5.0, 1.02), (None, 1.0)):
        before = kl_coef.coef
        kl_coef.follow(replace(result, kl=kl))
        assert kl_coef.coef == pytest.approx(before * change)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "losses").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_says_its_source_and_how_to_import_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert f"from {path.stem} import " in text
    assert "Source:" in text
    assert "arXiv:" in text
