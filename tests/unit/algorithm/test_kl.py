"""KL estimators: values, bounds, and which gradient each one has on average."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithm.kl import ESTIMATORS, token_kl


def test_values_by_hand():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    ref_logprobs = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    assert token_kl(logprobs, ref_logprobs, "k1").tolist() == [0.5, -1.0]
    assert token_kl(logprobs, ref_logprobs, "k2").tolist() == [0.125, 0.5]
    expected = [math.exp(-0.5) - 0.5, math.e - 2.0]
    assert token_kl(logprobs, ref_logprobs, "k3").tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_logprobs_give_zero_and_no_gradient_but_for_k1(estimator):
    logprobs = torch.tensor([-0.3, -4.0], requires_grad=True)
    kl = token_kl(logprobs, logprobs.detach(), estimator)
    kl.sum().backward()
    assert kl.tolist() == [0.0, 0.0]
    assert logprobs.grad.tolist() == ([1.0, 1.0] if estimator == "k1" else [0.0, 0.0])


def test_fault_09_k3_is_clamped_where_documented():
    logprobs = torch.tensor([-15.0, -5.0], requires_grad=True)
    kl = token_kl(logprobs, torch.tensor([-5.0, -15.0]), "k3")
    kl.sum().backward()
    assert kl[0].item() == 10.0
    assert kl[1].item() == pytest.approx(9.0 + math.exp(-10.0))
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1.0 - math.exp(-10.0)])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("size", [50.0, 200.0])  # exp(200) is infinite in float32
def test_fault_09_large_log_ratios_give_finite_values_and_gradients(estimator, size):
    logprobs = torch.tensor([-size, 0.0], requires_grad=True)
    kl = token_kl(logprobs, torch.tensor([0.0, -size]), estimator)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_an_unknown_estimator_names_the_known_ones():
    with pytest.raises((ValueError, TypeError), match=r"k1.*k2.*k3"):
        token_kl(torch.zeros(1), torch.zeros(1), "low_var_kl")


@pytest.mark.parametrize("seed", range(3))
def test_on_policy_gradients_are_those_that_the_table_promises(seed):
    """Summing over all tokens with their probabilities gives the mean over draws without any noise."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), dim=0)
    policy = torch.log_softmax(logits, dim=0)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def mean_gradient(estimator):
        return gradient((policy.detach().exp() * token_kl(policy, reference, estimator)).sum())

    reverse = gradient((policy.exp() * (policy - reference)).sum())
    forward = gradient((reference.exp() * (reference - policy)).sum())
    torch.testing.assert_close(mean_gradient("k1"), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(mean_gradient("k2"), reverse, rtol=0, atol=1e-14)
    torch.testing.assert_close(mean_gradient("k3"), forward, rtol=0, atol=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_k1_and_k3_have_the_true_divergence_as_their_mean(seed):
    generator = torch.Generator().manual_seed(seed)
    policy, reference = torch.log_softmax(torch.randn(2, 6, generator=generator, dtype=torch.float64), dim=1)
    true = (policy.exp() * (policy - reference)).sum().item()
    for estimator in ("k1", "k3"):
        assert (policy.exp() * token_kl(policy, reference, estimator)).sum().item() == pytest.approx(true, abs=1e-14)
