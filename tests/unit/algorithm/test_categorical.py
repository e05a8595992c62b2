"""Log-probs and entropy from logits."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithm.categorical import selected_logprobs_and_entropy


def random_logits(seed, rows=5, vocabulary=11):
    generator = torch.Generator().manual_seed(seed)
    logits = 3.0 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, vocabulary, (rows,), generator=generator)


def test_uniform_logits_by_hand():
    logprobs, entropy = selected_logprobs_and_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
    assert logprobs.tolist() == pytest.approx([-math.log(4.0)] * 2)
    assert entropy.tolist() == pytest.approx([math.log(4.0)] * 2)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_agree_with_finite_differences(seed):
    logits, targets = random_logits(seed)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: selected_logprobs_and_entropy(z, targets, temperature=0.7), (logits,))


@pytest.mark.parametrize("seed", range(3))
def test_logprobs_of_all_tokens_sum_to_one_and_give_the_entropy(seed):
    logits, _ = random_logits(seed, rows=1)
    all_tokens = torch.arange(11)
    logprobs, entropy = selected_logprobs_and_entropy(logits.expand(11, 11), all_tokens)
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-14)
    assert entropy[0].item() == pytest.approx(-(logprobs.exp() * logprobs).sum().item(), abs=1e-14)


def test_fault_21_temperature_divides_the_logits_of_both():
    logits, targets = random_logits(0)
    hot = selected_logprobs_and_entropy(logits, targets, temperature=0.7)
    torch.testing.assert_close(hot, selected_logprobs_and_entropy(logits / 0.7, targets))
    assert not torch.allclose(hot[1], selected_logprobs_and_entropy(logits, targets)[1])


def test_fault_22_logits_of_minus_infinity_give_finite_entropy_and_gradients():
    logits = torch.tensor([[1.0, -torch.inf, 2.0], [-torch.inf, 5.0, -torch.inf]], requires_grad=True)
    logprobs, entropy = selected_logprobs_and_entropy(logits, torch.tensor([2, 1]))
    (logprobs + entropy).sum().backward()
    p = 1.0 / (1.0 + math.exp(-1.0))
    assert entropy.tolist() == pytest.approx([-p * math.log(p) - (1 - p) * math.log(1 - p), 0.0], abs=1e-6)
    assert logprobs.tolist() == pytest.approx([math.log(p), 0.0], abs=1e-6)
    assert logits.grad.isfinite().all()


def test_large_logits_lose_no_precision():
    logits, targets = random_logits(1)
    shifted = (logits + 1e4).float()
    exact = selected_logprobs_and_entropy(shifted.double(), targets)
    torch.testing.assert_close(
        selected_logprobs_and_entropy(shifted, targets), (exact[0].float(), exact[1].float()), rtol=1e-5, atol=1e-6
    )


def test_half_precision_logits_are_worked_on_in_float32():
    logits, targets = random_logits(2)
    rounded = logits.bfloat16()
    for result, exact in zip(
        selected_logprobs_and_entropy(rounded, targets),
        selected_logprobs_and_entropy(rounded.float(), targets),
        strict=True,
    ):
        assert result.dtype == torch.float32
        assert torch.equal(result, exact)


def test_entropy_that_is_only_reported_has_no_gradient():
    logits, targets = random_logits(3)
    logits.requires_grad_()
    logprobs, entropy = selected_logprobs_and_entropy(logits, targets, entropy_gradient=False)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_gives_no_distribution_is_an_error(temperature):
    with pytest.raises(ValueError, match="temperature must be positive"):
        selected_logprobs_and_entropy(torch.zeros(1, 2), torch.tensor([0]), temperature=temperature)
