"""Agreement with verl 0.9.1 on recorded values, vector by vector.

Each vector is in one of three tables: MATCHES (the same value), DIFFERS (with the reason and the value that is right),
ELSEWHERE (not part of the algorithms here). A test holds that none is in two tables or in none. Families with a file of
their own have the same tables there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.algorithm.categorical import selected_logprobs_and_entropy
from tandem.algorithm.correction import Correction, check_correction
from tandem.algorithm.kl import check_estimator, token_kl
from tandem.algorithm.masked import masked_mean, masked_sum, token_weights
from tandem.algorithm.mismatch import Mismatch
from tandem.algorithm.whitening import whiten
from tests.parity.verl import AGGREGATION, CLOSE, MASK, VECTORS, batch, family, literal, tensor

OWN_FILES = ("adv/", "pg/", "value/")  # families with files of their own: test_verl_advantages, _losses, _values

# --- one function per family: checks a vector -------------------------------------------------------------------------


def aggregated_loss(mask: Tensor, losses: Tensor, mode: str) -> Tensor:
    weights = token_weights(AGGREGATION[mode], mask, constant=6, dtype=torch.float64)
    return masked_sum(weights * losses, mask)


def aggregation(vector: dict) -> None:
    options = literal(vector)
    mask = MASK.clone()
    if "mask_row_zeroed" in options:
        mask[options["mask_row_zeroed"]] = False
    losses = batch("advantages")
    if "nan_at" in options:
        losses[tuple(options["nan_at"])] = torch.nan
    if options.get("dp_size") == 2:  # verl averages over two ranks with the same rows; here they are one mini-batch
        mask, losses = mask.repeat(2, 1), losses.repeat(2, 1)
    ours = aggregated_loss(mask, losses, options["loss_agg_mode"])
    torch.testing.assert_close(ours, tensor(vector["output"]), **CLOSE)


def kl(estimator: str) -> Callable[[dict], None]:
    def check(vector: dict) -> None:
        logprobs = batch("log_prob").requires_grad_()
        ours = token_kl(logprobs, batch("ref_log_prob"), estimator)
        ours.sum().backward()
        torch.testing.assert_close(ours.detach(), tensor(vector["output"]["value"]), **CLOSE)
        torch.testing.assert_close(logprobs.grad, tensor(vector["output"]["grad"]), **CLOSE)

    return check


def kl_bounds(vector: dict) -> None:
    logprobs, reference = (torch.tensor(literal(vector)[name]) for name in ("logprob", "ref"))
    torch.testing.assert_close(token_kl(logprobs, reference, "k3").double(), tensor(vector["output"]), **CLOSE)


def kl_unknown(vector: dict) -> None:
    assert "raises" in vector
    with pytest.raises(ValueError, match="unknown KL estimator"):
        check_estimator("bogus")


def categorical(vector: dict) -> tuple[Tensor, Tensor]:
    logits = batch("logits").reshape(-1, 5)
    results = selected_logprobs_and_entropy(
        logits, batch("labels").flatten(), temperature=literal(vector).get("temperature", 1.0)
    )
    return results[0].reshape(8, 6), results[1].reshape(8, 6)


def logprobs(vector: dict) -> None:
    torch.testing.assert_close(categorical(vector)[0], tensor(vector["output"]), **CLOSE)


def entropy(vector: dict) -> None:
    torch.testing.assert_close(categorical(vector)[1], tensor(vector["output"]), **CLOSE)


def mean_entropy(vector: dict) -> None:
    torch.testing.assert_close(masked_mean(categorical(vector)[1], MASK), tensor(vector["output"]), **CLOSE)


def mean(vector: dict) -> None:
    values = batch("advantages")
    torch.testing.assert_close(masked_mean(values, MASK), tensor(vector["output"]["all"]), **CLOSE)
    torch.testing.assert_close(masked_mean(values, MASK, dim=1), tensor(vector["output"]["axis-1"]), **CLOSE)


def variance(vector: dict) -> None:
    values = batch("advantages")
    whitened = whiten(values, MASK, eps=0.0)
    scale = (values - masked_mean(values, MASK)) / whitened
    torch.testing.assert_close(scale[MASK].square(), tensor(vector["output"]).expand(int(MASK.sum())), **CLOSE)


def corrected(correction: Correction) -> Tensor:
    return correction(batch("old_log_probs"), batch("rollout_log_probs"), MASK)


def weights_of(correction: Correction) -> Callable[[dict], None]:
    def check(vector: dict) -> None:
        assert literal(vector)["rollout_is"] == "token"
        torch.testing.assert_close(corrected(correction), tensor(vector["output"]["weights"]), **CLOSE)
        torch.testing.assert_close(tensor(vector["output"]["mask"]), MASK.double())

    return check


def uncorrected(vector: dict) -> None:
    assert vector["output"]["weights"] is None
    assert torch.equal(corrected(Correction("none")), tensor(vector["output"]["mask"]))


def unknown_correction(vector: dict) -> None:
    assert "raises" in vector
    with pytest.raises(ValueError, match="unknown correction"):
        check_correction(literal(vector)["rollout_is"])


def correction_below_zero(vector: dict) -> None:
    assert "raises" in vector
    with pytest.raises(ValueError, match="must have 1 in it"):
        Correction("token_tis", high=literal(vector)["rollout_is_threshold"])


def mismatch(vector: dict) -> None:
    """The estimate that cannot be negative, of those that verl gives; and the largest ratio, from its own weights."""
    ours = Mismatch.between(batch("old_log_probs"), batch("rollout_log_probs"), MASK).metrics()
    assert ours["mismatch/kl"] == pytest.approx(vector["output"]["k3_kl"], rel=1e-9)
    weights = tensor(VECTORS["rc/IS token TIS 2.0"]["output"]["weights"])
    assert ours["mismatch/share_outside"] == pytest.approx(weights.eq(2.0).sum().item() / MASK.sum().item())


MATCHES: dict[str, Callable[[dict], None]] = {
    "agg/token-mean local": aggregation,
    "agg/token-mean one fully masked row": aggregation,
    "agg/token-sum dp=2 without global info": aggregation,
    "agg/token-sum one fully masked row": aggregation,
    "agg/token-sum NaN outside mask": aggregation,
    "agg/seq-mean-token-sum local": aggregation,
    "agg/seq-mean-token-sum dp=2 tokens=40 gbs=16": aggregation,
    "agg/seq-mean-token-sum one fully masked row": aggregation,
    "agg/seq-mean-token-sum-norm local": aggregation,
    "agg/seq-mean-token-sum-norm one fully masked row": aggregation,
    "agg/seq-mean-token-mean local": aggregation,
    "agg/seq-mean-token-mean dp=2 tokens=40 gbs=16": aggregation,
    "agg/seq-mean-token-mean one fully masked row": aggregation,
    "kl/mse": kl("k2"),
    "kl/k2": kl("k2"),
    "kl/low_var_kl": kl("k3"),
    "kl/k3": kl("k3"),
    "kl/k3 clamp: ref-logp=+-30": kl_bounds,
    "kl/bogus": kl_unknown,
    "entropy/entropy_from_logits": entropy,
    "entropy/compute_entropy_loss token-mean": mean_entropy,
    "logp/naive": logprobs,
    "logp/v2": logprobs,
    "logp/temperature 0.7": logprobs,
    "masked/mean": mean,
    "masked/var": variance,
    "rc/metrics only": uncorrected,
    "rc/IS token TIS 2.0": weights_of(Correction("token_tis")),
    "rc/IS token icepop 0.5_2.0": weights_of(Correction("token_mask", low=0.5)),
    "rc/IS unknown level raises": unknown_correction,
    "rc/IS threshold -1 raises": correction_below_zero,
    "rc/offpolicy metrics": mismatch,
}


# --- where verl is wrong ----------------------------------------------------------------------------------------------


def nan_outside_of_the_mask(vector: dict) -> None:
    """verl's seq-* modes multiply by the mask, and NaN * 0 is NaN; what is outside of the mask must not count."""
    options = literal(vector)
    losses = batch("advantages")
    expected = aggregated_loss(MASK, losses, options["loss_agg_mode"])
    losses[tuple(options["nan_at"])] = torch.nan
    assert tensor(vector["output"]).isnan()
    assert aggregated_loss(MASK, losses, options["loss_agg_mode"]).item() == expected.item()


def rejection_of_sequences(vector: dict) -> None:
    """verl takes a rejected response out of the mask, so out of denominators that would have to be known before the
    log-probs are, and leaves the others uncorrected. Here the same ones are rejected and still counted, as all that
    were drawn must be, and the others weigh what they are worth: exp of the sum of their log-ratios."""
    low, high = map(float, literal(vector)["rollout_rs_threshold"].split("_"))
    ours = corrected(Correction("sequence_mask", low, high))
    assert torch.equal(ours.ne(0), tensor(vector["output"]["mask"]).bool())
    kept = ours.ne(0).any(dim=1)
    assert kept.sum() == 1
    log_ratios = torch.where(MASK, batch("old_log_probs") - batch("rollout_log_probs"), 0.0).sum(dim=1)
    torch.testing.assert_close(ours[kept, 0], log_ratios[kept].exp(), **CLOSE)


DIFFERS: dict[str, Callable[[dict], None]] = {
    "agg/seq-mean-token-sum NaN outside mask": nan_outside_of_the_mask,
    "agg/seq-mean-token-mean NaN outside mask": nan_outside_of_the_mask,
    "rc/RS seq_sum_k1": rejection_of_sequences,
}

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "denominators are computed for the whole mini-batch, so there is no call that could lack them": (
        "agg/token-mean dp=2 without global info",
        "agg/seq-mean-token-sum dp=2 without global info",
        "agg/seq-mean-token-sum-norm dp=2 without global info",
        "agg/seq-mean-token-mean dp=2 without global info",
    ),
    "KL: |d| is not an estimator of it; '+' has the value of one and the gradient of k2, for which k2 is offered": (
        "kl/abs",
        "kl/k1+",
        "kl/kl+",
        "kl/abs+",
        "kl/mse+",
        "kl/low_var_kl+",
    ),
    "rejection by a bound on a divergence is not offered: a ratio says the same, and is what the weight is made of": (
        "rc/RS seq_max_k3",
        "rc/RS seq_mean_k2",
        "rc/RS seq_mean_k3",
        "rc/RS seq_sum_k2",
        "rc/RS token_k2",
        "rc/RS token_k3",
        "rc/RS token_k1,seq_max_k2 + IS token",
        "rc/RS unknown option raises",
    ),
    "masks follow from the lengths that the engine hands out, not from a search for EOS": family("response_mask/"),
    "reward functions are no part of the algorithms": family("score/"),
}


@pytest.mark.parametrize("name", MATCHES)
def test_same_value_as_verl(name):
    MATCHES[name](VECTORS[name])


@pytest.mark.parametrize("name", DIFFERS)
def test_differs_from_verl_for_a_reason(name):
    assert DIFFERS[name].__doc__
    DIFFERS[name](VECTORS[name])


def test_each_vector_is_in_exactly_one_table():
    listed = [*MATCHES, *DIFFERS, *(name for names in ELSEWHERE.values() for name in names)]
    assert sorted(listed) == sorted(name for name in VECTORS if not name.startswith(OWN_FILES))
