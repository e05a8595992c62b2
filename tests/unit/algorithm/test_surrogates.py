"""The surrogates by hand; what holds for every loss is in test_every_loss.py."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from tandem.algorithm.correction import importance_ratio
from tandem.algorithm.losses import ClippedSurrogate, grpo_loss
from tandem.algorithm.masked import token_weights
from tandem.algorithm.surrogates import SURROGATES, SurrogateName, check_surrogate, cispo, clipped_surrogate, gspo

EVERY_TOKEN = torch.ones(1, 100, dtype=torch.bool)


def surrogate_at(ratio, advantage, **options):
    """Token loss and its derivative by the log-prob, at one ratio, in float64."""
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old = logprob.detach() - math.log(ratio)
    token = clipped_surrogate(logprob, old, torch.tensor([advantage], dtype=torch.float64), **options)
    token.loss.sum().backward()
    return token, logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "flows"),
    [
        (1.1, 2.0, -2.2, True),
        (1.3, 2.0, -2.56, False),  # above the upper range, which is wider
        (1.25, 2.0, -2.5, True),
        (0.5, 2.0, -1.0, True),  # below, but the advantage pulls it back
        (0.85, -2.0, 1.8, False),
        (1.9, -2.0, 3.8, True),
        (3.5, -2.0, 6.0, False),  # dual clip
        (3.5, 2.0, -2.56, False),
        (0.5, 0.0, 0.0, False),
    ],
)
def test_loss_and_gradient_by_hand(ratio, advantage, expected, flows):
    token, gradient = surrogate_at(ratio, advantage, clip_low=0.1, clip_high=0.28, clip_dual=3.0)
    assert token.loss.item() == pytest.approx(expected, abs=1e-12)
    assert gradient == (pytest.approx(-advantage * ratio, abs=1e-12) if flows else 0.0)
    assert bool(token.dual_clipped) == (advantage < 0 and ratio == 3.5)
    assert bool(token.clipped | token.dual_clipped) == (not flows and advantage != 0)
    assert token.ratio.item() == pytest.approx(ratio)
    assert not token.ratio.requires_grad


def test_without_dual_clip_a_growing_ratio_of_a_bad_token_keeps_its_gradient():
    token, gradient = surrogate_at(3.5, -2.0)
    assert token.loss.item() == pytest.approx(7.0)
    assert gradient == pytest.approx(7.0)


def test_fault_13_the_ratio_of_a_response_is_of_the_mean_in_gspo_and_of_the_sum_in_a_correction():
    old_logprobs = torch.full((1, 100), -2.0, dtype=torch.float64)
    logprobs = old_logprobs + 0.012
    ratio = gspo(logprobs, old_logprobs, torch.ones_like(logprobs), EVERY_TOKEN, clip_low=0.2, clip_high=0.2).ratio
    torch.testing.assert_close(ratio, torch.full_like(ratio, math.exp(0.012)))
    product = importance_ratio(logprobs, old_logprobs, EVERY_TOKEN, by_sequence=True)
    torch.testing.assert_close(product, torch.full_like(product, math.exp(1.2)))


def test_the_gradient_of_gspo_is_that_of_the_loss_of_whole_responses():
    """-min(s A, clip(s) A), mean over responses, by automatic differentiation through s."""
    generator = torch.Generator().manual_seed(0)
    logprobs, old_logprobs = (-torch.rand(8, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    mask = torch.rand(8, 5, generator=generator) < 0.7
    logprobs.requires_grad_()
    ours = grpo_loss(
        logprobs, old_logprobs, advantages, mask,
        clip_low=0.1, clip_high=0.1, aggregation="sequence_mean", surrogate="gspo",
    )  # fmt: skip
    mean = ((logprobs - old_logprobs) * mask).sum(dim=1) / mask.sum(dim=1)
    whole = -torch.minimum(mean.exp() * advantages, mean.exp().clamp(0.9, 1.1) * advantages).mean()
    (expected,) = torch.autograd.grad(whole, logprobs)
    (gradient,) = torch.autograd.grad(ours, logprobs)
    torch.testing.assert_close(ours, whole)
    torch.testing.assert_close(gradient, expected)
    stopped = expected.eq(0.0).all(dim=1)
    assert 0 < stopped.sum() < 8


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.1, 2.0, 1.1), (1.5, 2.0, 1.28), (1.5, -2.0, 1.28), (0.5, 2.0, 0.9), (0.5, -2.0, 0.9)],
)
def test_cispo_clips_the_weight_on_both_sides_and_keeps_the_gradient(ratio, advantage, weight):
    logprobs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old_logprobs = logprobs.detach() - math.log(ratio)
    advantages = torch.full_like(old_logprobs, advantage)
    token = cispo(logprobs, old_logprobs, advantages, EVERY_TOKEN[:, :1], clip_low=0.1, clip_high=0.28)
    (gradient,) = torch.autograd.grad(token.loss.sum(), logprobs)
    assert token.loss.item() == pytest.approx(weight * advantage)  # its log-prob is -1
    assert gradient.item() == pytest.approx(-weight * advantage)
    assert bool(token.clipped) == (weight != ratio)
    assert token.ratio.item() == pytest.approx(ratio)


def test_ratios_and_clip_fraction_are_those_of_the_surrogate():
    """Log-ratios of two responses: 0.3 and -0.1, mean 0.1; 0.5 on one token."""
    mask = torch.tensor([[True, True], [True, False]])
    old_logprobs = torch.full((2, 2), -1.0, dtype=torch.float64)
    log_ratio = torch.tensor([[0.3, -0.1], [0.5, 9.0]], dtype=torch.float64)
    batch = {
        "logprobs": old_logprobs + log_ratio,
        "old_logprobs": old_logprobs,
        "advantages": torch.ones(2, 1, dtype=torch.float64),
        "response_mask": mask,
        "weights": token_weights("token_mean", mask, dtype=torch.float64),
    }
    by_token = torch.where(mask, log_ratio.exp(), 0.0)
    by_response = torch.where(mask, torch.tensor([[0.1], [0.5]], dtype=torch.float64).exp(), 0.0)
    for surrogate, ratio, clipped in (("ppo_clip", by_token, 2), ("cispo", by_token, 2), ("gspo", by_response, 1)):
        output = ClippedSurrogate(0.2, 0.2, surrogate=surrogate)(**batch)
        torch.testing.assert_close(output.ratio, ratio)
        assert output.metrics["ratio_mean"].item() == pytest.approx(ratio.sum().item())
        assert output.metrics["clip_fraction"].item() == clipped
        assert output.metrics["approx_kl"].item() == pytest.approx(-0.7)
        assert "dual_clip_fraction" not in output.metrics


def test_an_unknown_surrogate_names_the_known_ones():
    assert set(get_args(SurrogateName)) == set(SURROGATES)
    with pytest.raises(ValueError, match="unknown surrogate 'ppo'; choose one of ppo_clip, gspo, cispo"):
        check_surrogate("ppo")
