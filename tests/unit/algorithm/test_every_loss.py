"""What holds for every loss: its gradient by hand, and the faults that users report."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.algorithm.kl import token_kl
from tandem.algorithm.masked import AGGREGATIONS, Aggregation, token_weights
from tandem.algorithm.protocols import Loss, LossOutput
from tests.every_loss import LOSSES, SURROGATES, make_loss

Batch = dict[str, Tensor]
EVERY_LOSS = pytest.mark.parametrize("name", LOSSES)
TERMS = {"kl_coef": 0.3, "kl_estimator": "k3", "entropy_coef": 0.05}


def random_batch(seed: int = 0, rows: int = 6, length: int = 7) -> Batch:
    """Ratios in and out of all ranges, gaps in the mask, one row without a token; in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, length, generator=generator, dtype=torch.float64)

    logprobs = -normal().abs() - 0.1
    mask = torch.rand(rows, length, generator=generator) < 0.6
    mask[0, 0], mask[2] = True, False
    return {
        "logprobs": logprobs,
        "old_logprobs": (logprobs + 0.4 * normal()).clamp(max=0.0),
        "ref_logprobs": logprobs + 0.7 * normal(),
        "advantages": normal()[:, :1].abs() * torch.tensor([1.0, -1.0] * (rows // 2))[:, None],
        "response_mask": mask,
        "entropy": normal().abs(),
    }


def loss_of(name: str, batch: Batch, aggregation: Aggregation = "token_mean") -> Loss:
    """With all terms that it can have."""
    whole = {key: batch[key] for key in ("advantages", "old_logprobs", "response_mask")}
    return make_loss(name, aggregation, **whole, **(TERMS if name in SURROGATES else {}))


def plain_loss_of(name: str, batch: Batch, aggregation: Aggregation = "token_mean") -> Loss:
    """Without terms of KL and entropy."""
    whole = {key: batch[key] for key in ("advantages", "old_logprobs", "response_mask")}
    return make_loss(name, aggregation, **whole)


def weights_of(batch: Batch, aggregation: Aggregation = "token_mean") -> Tensor:
    return token_weights(aggregation, batch["response_mask"], constant=20, dtype=batch["logprobs"].dtype)


def run(loss: Loss, batch: Batch, weights: Tensor) -> tuple[LossOutput, Tensor]:
    """The output, and the gradient of the log-probs."""
    logprobs = batch["logprobs"].clone().requires_grad_()
    output = loss(**{**batch, "logprobs": logprobs}, weights=weights)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output, gradient


# --- the gradient of each token's loss, derived by hand ---------------------------------------------------------------


def by_hand(name: str, r: Tensor, s: Tensor, batch: Batch) -> Tensor:
    """d loss_t / d logprobs_t with r the ratio of the token and s that of its response; of gmpo d loss_i."""
    mask, p, q = batch["response_mask"], batch["logprobs"].exp(), batch["old_logprobs"].exp()
    A = batch["advantages"].expand_as(r)
    up = A > 0

    def inside(ratio: Tensor, low: float, high: float) -> Tensor:
        return torch.where(up, ratio <= 1 + high, ratio >= 1 - low)

    def trusted(divergence: Tensor, bound: float) -> Tensor:
        return (divergence <= bound) | torch.where(up, p <= q, p >= q)

    if name == "ppo_clip":
        return -A * r * inside(r, 0.2, 0.28) * (up | (r <= 1.3))
    if name == "gspo":
        return -A * s * inside(s, 0.05, 0.08)
    if name == "cispo":
        return -A * r.clamp(0.7, 1.2)
    if name == "gpg":
        return -A
    if name == "gmpo":
        in_range = torch.where(up, r.log() <= 0.2, r.log() >= -0.2)
        bounded = torch.where(in_range, r.log(), 0.2 * A.sign())
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
        mean = torch.where(mask, bounded, 0.0).sum(dim=1, keepdim=True) / lengths
        return -A * mean.exp() * in_range
    if name == "sapo":
        tau = torch.where(up, torch.tensor(1.0).double(), torch.tensor(1.05).double())
        gate = 1.0 / (1.0 + (-tau * (r - 1.0)).exp())
        return -A * 4.0 * gate * (1.0 - gate) * r
    if name == "dppo_tv":
        return -A * r.clamp(max=1.3) * trusted((p - q).abs(), 0.05)
    if name == "dppo_kl":
        return -A * r.clamp(max=1.3) * trusted(q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log(), 0.02)
    assert name == "kl_cov"
    old = batch["old_logprobs"]
    covariance = torch.where(mask, (A - A[mask].mean()) * (old - old[mask].mean()), -torch.inf)
    held_back = torch.zeros_like(mask).flatten()
    held_back[covariance.flatten().topk(int(0.3 * int(mask.sum()))).indices] = True
    return -A * r + 0.5 * r.log().sign() * held_back.reshape(mask.shape)


@EVERY_LOSS
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_the_one_derived_by_hand(name: str, seed: int) -> None:
    """With `sequence_mean` gmpo's token gradients are those of the table as well: -A_i exp(mean) / (R T_i)."""
    batch = random_batch(seed)
    mask = batch["response_mask"]
    log_ratio = torch.where(mask, batch["logprobs"] - batch["old_logprobs"], 0.0)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    s = (log_ratio.sum(dim=1, keepdim=True) / lengths).exp().expand_as(log_ratio)
    weights = weights_of(batch, "sequence_mean")
    _, gradient = run(plain_loss_of(name, batch, "sequence_mean"), batch, weights)
    expected = torch.where(mask, weights * by_hand(name, log_ratio.exp(), s, batch), 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    plain = torch.where(mask, -weights * batch["advantages"], 0.0)
    assert name == "gpg" or (gradient - plain).abs().max() > 1e-3, "the ratio has no part in it"


# --- faults -----------------------------------------------------------------------------------------------------------


@EVERY_LOSS
def test_fault_04_without_contrast_there_is_the_gradient_of_the_kl_term_and_no_other(name: str) -> None:
    batch = random_batch()
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    weights = weights_of(batch)
    _, without = run(plain_loss_of(name, batch), batch, weights)
    assert not without.any()
    if name in SURROGATES:
        _, gradient = run(loss_of(name, batch), batch, weights)
        logprobs = batch["logprobs"].clone().requires_grad_()
        (0.3 * weights * token_kl(logprobs, batch["ref_logprobs"], "k3")).sum().backward()
        torch.testing.assert_close(gradient, logprobs.grad, rtol=0, atol=1e-15)
        assert gradient[batch["response_mask"]].ne(0).all()


@EVERY_LOSS
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_fault_05_any_cut_into_micro_batches_gives_the_same_loss_gradient_and_metrics(
    name: str, aggregation: Aggregation
) -> None:
    batch = random_batch()
    loss, weights = loss_of(name, batch, aggregation), weights_of(batch, aggregation)
    whole, whole_gradient = run(loss, batch, weights)
    assert name not in SURROGATES or whole.metrics["clip_fraction"] > 0
    for cut in (0b00001, 0b00110, 0b10100, 0b11111):  # each bit says whether there is a cut after that row
        ends = [row for row in range(1, 6) if cut >> (row - 1) & 1] + [6]
        slices = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        pieces = [run(loss, {k: v[rows] for k, v in batch.items()}, weights[rows]) for rows in slices]
        outputs = [output for output, _ in pieces]
        torch.testing.assert_close(sum(output.loss for output in outputs), whole.loss, rtol=0, atol=1e-12)
        assert sum(output.num_tokens for output in outputs) == whole.num_tokens
        for metric, total in whole.metrics.items():
            torch.testing.assert_close(sum(o.metrics[metric] for o in outputs), total, rtol=0, atol=1e-12)
        joined = torch.cat([gradient for _, gradient in pieces])
        torch.testing.assert_close(joined, whole_gradient, rtol=0, atol=1e-12)


@EVERY_LOSS
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_fault_06_responses_out_of_the_mask_are_out_of_loss_and_denominator(
    name: str, aggregation: Aggregation
) -> None:
    batch = random_batch()
    longer = {key: torch.cat([value, value[:2]]) for key, value in batch.items()}
    longer["response_mask"][6:] = False
    found, gradient = run(loss_of(name, longer, aggregation), longer, weights_of(longer, aggregation))
    expected, expected_gradient = run(loss_of(name, batch, aggregation), batch, weights_of(batch, aggregation))
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(gradient, torch.cat([expected_gradient, torch.zeros(2, 7, dtype=torch.float64)]))


@EVERY_LOSS
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_fault_08_what_is_outside_of_the_mask_has_no_effect(name: str, poison: float) -> None:
    batch = random_batch()
    batch["advantages"] = batch["advantages"].expand(6, 7).clone()
    batch["correction"] = batch["entropy"] + 0.5
    outside = ~batch["response_mask"]
    weights = weights_of(batch)
    poisoned = {k: v if v.dtype == torch.bool else v.masked_fill(outside, poison) for k, v in batch.items()}
    clean, clean_gradient = run(loss_of(name, batch), batch, weights)
    output, gradient = run(loss_of(name, poisoned), poisoned, weights)
    assert output.loss.item() == clean.loss.item()
    assert {k: v.item() for k, v in output.metrics.items()} == {k: v.item() for k, v in clean.metrics.items()}
    assert torch.equal(gradient, clean_gradient)
    assert not gradient[outside].any()
    assert not output.ratio[outside].any()


@EVERY_LOSS
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_fault_08_every_token_masked_gives_a_loss_of_zero_without_gradient(name: str, aggregation: Aggregation) -> None:
    batch = {key: torch.full_like(value, float("nan")) for key, value in random_batch().items()}
    batch["response_mask"] = torch.zeros(6, 7, dtype=torch.bool)
    output, gradient = run(loss_of(name, batch, aggregation), batch, weights_of(batch, aggregation))
    assert output.loss.item() == 0.0
    assert not gradient.any()
    assert all(total == 0.0 for total in output.metrics.values())


@EVERY_LOSS
@pytest.mark.parametrize("size", [50.0, 200.0])  # exp(200) is infinite in float32
def test_fault_09_large_log_ratios_give_finite_loss_and_gradient(name: str, size: float) -> None:
    low, high = torch.full((2, 4), -size), torch.zeros(2, 4)
    batch = {
        "logprobs": torch.cat([low, high, low, high]),
        "old_logprobs": torch.cat([high, low, low, high]),
        "ref_logprobs": torch.cat([high, low, high, low]),
        "advantages": torch.tensor([[1.0], [-1.0]] * 4),
        "response_mask": torch.ones(8, 4, dtype=torch.bool),
        "entropy": torch.ones(8, 4),
    }
    output, gradient = run(loss_of(name, batch), batch, weights_of(batch))
    assert output.loss.isfinite()
    assert gradient.isfinite().all()
    assert output.ratio.isfinite().all()
    _, plain = run(plain_loss_of(name, batch), batch, weights_of(batch))
    equal = slice(4, 8)  # log-probs alike, however small
    torch.testing.assert_close(plain[equal], -(batch["advantages"] * weights_of(batch))[equal])


@EVERY_LOSS
def test_fault_12_on_policy_every_ratio_is_exactly_one_and_the_gradient_is_the_policy_gradient(name: str) -> None:
    """In float32, whose log-probs are not round numbers."""
    batch = {k: v if v.dtype == torch.bool else v.float() for k, v in random_batch(rows=20, length=30).items()}
    batch["old_logprobs"] = batch["logprobs"].clone()
    mask, weights = batch["response_mask"], weights_of(batch, "sequence_mean")
    output, gradient = run(plain_loss_of(name, batch, "sequence_mean"), batch, weights)
    assert torch.equal(output.ratio, mask.float())
    assert output.metrics["ratio_mean"] == mask.sum()
    assert output.metrics.get("clip_fraction", 0.0) == 0.0
    torch.testing.assert_close(gradient, torch.where(mask, -weights * batch["advantages"], 0.0), rtol=1e-5, atol=0)


@EVERY_LOSS
def test_no_gradient_flows_into_old_and_reference_log_probs_and_advantages(name: str) -> None:
    batch = random_batch()
    loss, weights = loss_of(name, batch), weights_of(batch)
    frozen = [batch[key].requires_grad_() for key in ("old_logprobs", "ref_logprobs")]
    batch["correction"] = (batch["entropy"] + 0.5).requires_grad_()
    loss(**{**batch, "logprobs": batch["logprobs"].requires_grad_()}, weights=weights).loss.backward()
    assert all(tensor.grad is None for tensor in (*frozen, batch["correction"]))


@EVERY_LOSS
def test_a_correction_weighs_the_policy_gradient_and_of_an_own_function_everything(name: str) -> None:
    batch = random_batch()
    weights = weights_of(batch)
    correction = torch.rand(6, 7, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    _, gradient = run(loss_of(name, batch), {**batch, "correction": correction}, weights)
    _, terms = run(loss_of(name, batch), {**batch, "advantages": torch.zeros_like(batch["advantages"])}, weights)
    _, weighted = run(plain_loss_of(name, batch), batch, weights * correction)
    torch.testing.assert_close(gradient, weighted + (terms if name in SURROGATES else 0.0))
