"""The loss objects: their terms, metrics and checks. What holds for every loss is in test_every_loss.py."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithm.function_loss import FunctionLoss
from tandem.algorithm.kl import token_kl
from tandem.algorithm.losses import ClippedSurrogate, as_loss, grpo_loss
from tandem.algorithm.masked import AGGREGATIONS, token_weights
from tandem.algorithm.protocols import Loss

NAN = float("nan")


def random_batch(seed=0, rows=5, length=6):
    """A mini-batch in which much of the ratio is out of the clip range, the mask has gaps and one row is empty."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, length, generator=generator, dtype=torch.float64)

    logprobs = -normal().abs() - 0.1
    mask = torch.rand(rows, length, generator=generator) < 0.6
    mask[0, 0], mask[2] = True, False
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.4 * normal(),
        "ref_logprobs": logprobs + 0.7 * normal(),
        "advantages": normal()[:, :1].abs() * torch.tensor([[1.0], [-1.0], [1.0], [-1.0], [1.0]]),
        "response_mask": mask,
        "entropy": normal().abs(),
    }


def run(loss, batch, weights):
    """Loss output, and gradients for log-probs and entropy."""
    logprobs = batch["logprobs"].clone().requires_grad_()
    entropy = batch["entropy"].clone().requires_grad_()
    output = loss(**{**batch, "logprobs": logprobs, "entropy": entropy}, weights=weights)
    gradients = torch.autograd.grad(output.loss, (logprobs, entropy), allow_unused=True)
    return output, [torch.zeros_like(logprobs) if g is None else g for g in gradients]


# --- a whole mini-batch -----------------------------------------------------------------------------------------------


def test_the_loss_is_the_weighted_sum_of_surrogate_kl_and_entropy():
    batch = random_batch()
    weights = token_weights("token_mean", batch["response_mask"], dtype=torch.float64)

    def at(**options):
        return run(ClippedSurrogate(**options), batch, weights)[0].loss

    kl = (weights * token_kl(batch["logprobs"], batch["ref_logprobs"], "k2")).sum()
    torch.testing.assert_close(at(kl_coef=0.5, kl_estimator="k2"), at() + 0.5 * kl)
    torch.testing.assert_close(at(entropy_coef=0.5), at() - 0.5 * (weights * batch["entropy"]).sum())


def test_metrics_are_sums_over_tokens_whose_means_are_right():
    mask = torch.tensor([[True, True, False], [True, True, False]])
    logprobs = torch.log(torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]))
    old_logprobs = logprobs - torch.log(torch.tensor([[2.0, 1.0, 9.0], [0.5, 4.0, 9.0]]))
    output = ClippedSurrogate(clip_dual=3.0)(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=torch.tensor([[1.0], [-1.0]]),
        response_mask=mask,
        weights=token_weights("token_mean", mask),
        ref_logprobs=logprobs - torch.log(torch.tensor([[2.0, 1.0, 1.0], [1.0, 0.01, 1.0]])),
        entropy=torch.tensor([[1.0, 2.0, NAN], [3.0, 4.0, NAN]]),
    )
    means = {name: (total / output.num_tokens).item() for name, total in output.metrics.items()}
    assert means == pytest.approx(
        {
            "ratio_mean": 7.5 / 4,
            "approx_kl": -math.log(4.0) / 4,
            "clip_fraction": 2 / 4,
            "dual_clip_fraction": 1 / 4,
            "kl": (0.5 + math.log(2.0) - 1.0 + 10.0) / 4,
            "kl_clamped": 1 / 4,
            "entropy": 10 / 4,
        },
        abs=1e-6,
    )
    torch.testing.assert_close(output.ratio, torch.tensor([[2.0, 1.0, 0.0], [0.5, 4.0, 0.0]]))


def test_not_finite_inside_of_the_mask_is_not_hidden():
    logprobs = torch.tensor([[-1.0, NAN]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert grpo_loss(logprobs, torch.zeros(1, 2), torch.ones(1), mask).isnan()


# --- grpo_loss and the constructor ------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_grpo_loss_is_the_loss_object_on_a_whole_batch(aggregation):
    batch = random_batch()
    weights = token_weights(aggregation, batch["response_mask"], constant=7, dtype=torch.float64)
    options = {"aggregation": aggregation, "constant_length": 7, "kl_coef": 0.3, "kl_estimator": "k2"}
    expected = ClippedSurrogate(0.1, 0.3, 2.0, **options)(**batch, weights=weights).loss
    tensors = [batch[name] for name in ("logprobs", "old_logprobs", "advantages", "response_mask")]
    per_token = grpo_loss(
        *tensors, clip_low=0.1, clip_high=0.3, clip_dual=2.0, ref_logprobs=batch["ref_logprobs"], **options
    )
    tensors[2] = tensors[2][:, 0]
    per_response = grpo_loss(
        *tensors, clip_low=0.1, clip_high=0.3, clip_dual=2.0, ref_logprobs=batch["ref_logprobs"], **options
    )
    assert per_token.item() == per_response.item() == expected.item()


def test_gradient_agrees_with_finite_differences():
    batch = random_batch()
    logprobs = batch["logprobs"].requires_grad_()

    def loss(values):
        return grpo_loss(
            values,
            batch["old_logprobs"],
            batch["advantages"],
            batch["response_mask"],
            clip_dual=1.3,
            ref_logprobs=batch["ref_logprobs"],
            kl_coef=0.2,
        )

    assert torch.autograd.gradcheck(loss, (logprobs,))


def test_a_term_without_its_input_is_an_error():
    batch = random_batch()
    weights = token_weights("token_mean", batch["response_mask"], dtype=torch.float64)
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        ClippedSurrogate(kl_coef=0.1)(**{**batch, "ref_logprobs": None}, weights=weights)
    with pytest.raises(ValueError, match="needs entropy"):
        ClippedSurrogate(entropy_coef=0.1)(**{**batch, "entropy": None}, weights=weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.5}, "clip_low must be between 0 and 1"),
        ({"clip_low": NAN}, "clip_low must be between 0 and 1"),
        ({"clip_high": -0.1}, "clip_high must be at least 0"),
        ({"clip_dual": 1.0}, "clip_dual must be more than 1"),
        ({"clip_dual": 3.0, "surrogate": "gspo"}, "clip_dual is for the surrogate ppo_clip, not for gspo"),
        ({"clip_dual": 3.0, "surrogate": "cispo"}, "clip_dual is for the surrogate ppo_clip, not for cispo"),
        ({"surrogate": "ppo"}, "ppo_clip.*gspo.*cispo"),
        *[
            ({name: value}, f"{name} must be finite and at least 0, got {value}")
            for name in ("kl_coef", "entropy_coef")
            for value in (-1.0, float("nan"), float("inf"))
        ],
        ({"kl_estimator": "k4"}, "k1.*k2.*k3"),
        ({"aggregation": "mean"}, "token_mean.*sequence_mean"),
        ({"aggregation": "constant"}, "needs a positive number of tokens"),
    ],
)
def test_values_out_of_range_are_refused_when_the_loss_is_made(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ClippedSurrogate(**options)


def test_a_loss_says_what_it_needs():
    plain, full = ClippedSurrogate(), ClippedSurrogate(kl_coef=0.1, entropy_coef=0.01)
    assert (plain.needs_reference, plain.needs_entropy) == (False, False)
    assert (full.needs_reference, full.needs_entropy) == (True, True)
    assert (plain.idle_without_advantage, full.idle_without_advantage) == (True, False)
    assert isinstance(plain, Loss)


# --- a user's own loss ------------------------------------------------------------------------------------------------


def test_own_loss_may_return_token_losses_or_one_number():
    batch = random_batch()
    weights = token_weights("token_mean", batch["response_mask"], dtype=torch.float64)

    def token_losses(*, logprobs, advantages, **_):
        return -advantages * logprobs

    def one_number(*, logprobs, advantages, weights, **_):
        return -(weights * advantages * logprobs).sum()

    expected = -(weights * batch["advantages"] * batch["logprobs"]).sum()
    for function in (token_losses, one_number):
        output, (gradient, _) = run(as_loss(function, ClippedSurrogate()), batch, weights)
        torch.testing.assert_close(output.loss, expected)
        torch.testing.assert_close(gradient, -weights * batch["advantages"])
        assert set(output.metrics) == {"ratio_mean", "approx_kl", "kl", "kl_clamped", "entropy"}


def test_own_loss_gets_all_the_keywords_of_the_protocol():
    seen = {}

    def own(**keywords):
        seen.update(keywords)
        return keywords["logprobs"]

    batch = random_batch()
    weights = token_weights("token_mean", batch["response_mask"], dtype=torch.float64)
    run(as_loss(own, ClippedSurrogate()), batch, weights)
    assert set(seen) == {
        "logprobs", "old_logprobs", "ref_logprobs", "advantages", "response_mask", "weights", "entropy",
    }  # fmt: skip
    assert seen["advantages"].shape == (5, 6)


def test_own_loss_with_its_own_needs_is_kept_as_it_is():
    loss = FunctionLoss(lambda **k: k["logprobs"], aggregation="sequence_mean", needs_reference=True)
    assert as_loss(loss, ClippedSurrogate()) is loss
    assert as_loss(ClippedSurrogate(), ClippedSurrogate()) == ClippedSurrogate()
    batch = {**random_batch(), "ref_logprobs": None}
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        loss(**batch, weights=batch["logprobs"])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss: None, "must return a tensor, it returned a NoneType"),
        (lambda loss: loss.item(), "must return a tensor, it returned a float"),
        (torch.Tensor.detach, "returned a tensor without a gradient"),
    ],
)
def test_own_loss_that_nothing_can_be_learned_from_is_named(result, message):
    def own(*, logprobs, **_):
        return result(logprobs.sum())

    batch = random_batch()
    batch["logprobs"].requires_grad_()
    with pytest.raises(ValueError, match=rf"own at .* {message}"):
        FunctionLoss(own)(**batch, weights=batch["logprobs"])


def test_own_loss_with_a_wrong_shape_is_named():
    def per_response(*, logprobs, **_):
        return logprobs.sum(dim=1)

    batch = random_batch()
    with pytest.raises(ValueError, match=r"per_response.* of shape \(5, 6\), it returned shape \(5,\)"):
        as_loss(per_response, ClippedSurrogate())(**batch, weights=batch["logprobs"])
