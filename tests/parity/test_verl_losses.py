"""Agreement with verl 0.9.1 on the recorded losses and their gradients; see test_verl_vectors.py for the tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from examples.losses.clip_cov import clip_cov
from examples.losses.dppo import binary_kl, dppo
from examples.losses.gmpo import gmpo
from examples.losses.gpg import gpg
from examples.losses.kl_cov import kl_cov
from examples.losses.sapo import sapo
from tandem.algorithm.function_loss import FunctionLoss
from tandem.algorithm.losses import ClippedSurrogate
from tandem.algorithm.masked import token_weights
from tandem.algorithm.protocols import Loss, LossFunction, LossOutput
from tests.parity.verl import AGGREGATION, CLOSE, MASK, VECTORS, batch, family, literal, tensor

LOGPROBS, OLD_LOGPROBS, ADVANTAGES = batch("log_prob"), batch("old_log_probs"), batch("advantages")


def evaluate(
    loss: Loss,
    vector: dict,
    *,
    logprobs: Tensor = LOGPROBS,
    old_logprobs: Tensor = OLD_LOGPROBS,
    advantages: Tensor = ADVANTAGES,
    mask: Tensor = MASK,
    correction: Tensor | None = None,
) -> tuple[LossOutput, Tensor]:
    """The loss of the recorded batch, corrected where the vector's is, and its gradient."""
    policy = logprobs.detach().requires_grad_()
    if literal(vector).get("use_is_weights") or "rollout_is_weights" in vector["inputs"]["from_batch"]:
        correction = batch("rollout_is_weights") if correction is None else correction
    output = loss(
        logprobs=policy,
        old_logprobs=old_logprobs,
        advantages=advantages,
        response_mask=mask,
        weights=token_weights(loss.aggregation, mask, constant=6, dtype=torch.float64),
        correction=correction,
    )
    output.loss.backward()
    return output, policy.grad


def assert_same(vector: dict, output: LossOutput, gradient: Tensor) -> None:
    expected = vector["output"]
    torch.testing.assert_close(output.loss.detach(), tensor(expected["loss"]), **CLOSE)
    torch.testing.assert_close(gradient, tensor(expected["dloss_dlogprob"]), **CLOSE)
    for theirs, ours in {
        "actor/pg_clipfrac": "clip_fraction",
        "actor/pg_clipfrac_lower": "dual_clip_fraction",
        "actor/ppo_kl": "approx_kl",
    }.items():
        if theirs in expected["metrics"] and ours in output.metrics:
            mean = (output.metrics[ours] / output.num_tokens).item()
            assert mean == pytest.approx(expected["metrics"][theirs], rel=1e-7, abs=1e-9)


# --- one function per family: checks a vector -------------------------------------------------------------------------


def surrogate(name: str = "ppo_clip", **given: Tensor) -> Callable[[dict], None]:
    """`given` is in the place of the recorded batch's."""

    def check(vector: dict) -> None:
        config = literal(vector)["config"]
        loss = ClippedSurrogate(
            clip_low=config.get("clip_ratio_low", 0.2),
            clip_high=config.get("clip_ratio_high", 0.2),
            clip_dual=config.get("clip_ratio_c", 3.0) if name == "ppo_clip" else None,
            aggregation=AGGREGATION[literal(vector)["loss_agg_mode"]],
            constant_length=6,
            surrogate=name,
        )
        assert_same(vector, *evaluate(loss, vector, **given))

    return check


def example(function: LossFunction, aggregation: str | None = None, **given: Tensor) -> Callable[[dict], None]:
    """A function of examples/losses/, with the vector's own aggregation unless said otherwise."""

    def check(vector: dict) -> None:
        name = aggregation or AGGREGATION[literal(vector)["loss_agg_mode"]]
        assert_same(vector, *evaluate(FunctionLoss(function, name), vector, **given))

    return check


def nothing_to_draw(vector: dict) -> None:
    bounds = literal(vector)["config"]["policy_loss"]
    advantages = clip_cov(ADVANTAGES, LOGPROBS, MASK, low=bounds["clip_cov_lb"], high=bounds["clip_cov_ub"])
    assert torch.equal(advantages, torch.where(MASK, ADVANTAGES, 0.0))
    assert_same_gradient_and_loss(vector, *evaluate(ClippedSurrogate(), vector, advantages=advantages))


def assert_same_gradient_and_loss(vector: dict, output: LossOutput, gradient: Tensor) -> None:
    """verl's clip fraction of Clip-Cov is the share of what was drawn."""
    torch.testing.assert_close(output.loss.detach(), tensor(vector["output"]["loss"]), **CLOSE)
    torch.testing.assert_close(gradient, tensor(vector["output"]["dloss_dlogprob"]), **CLOSE)


ONE_ROW_MASKED = MASK & (torch.arange(8) != 3)[:, None]
FAR_APART = OLD_LOGPROBS + torch.tensor([50.0, -50.0] * 3)  # log-ratios of +50 and -50 in turn
DPPO = {"low": 0.2, "high": 0.2}

MATCHES: dict[str, Callable[[dict], None]] = {
    "pg/vanilla token-mean": surrogate(),
    "pg/vanilla token-sum": surrogate(),
    "pg/vanilla seq-mean-token-sum": surrogate(),
    "pg/vanilla seq-mean-token-sum-norm": surrogate(),
    "pg/vanilla seq-mean-token-mean": surrogate(),
    "pg/vanilla clip .2/.28 (clip-higher)": surrogate(),
    "pg/vanilla dual clip c=1.5": surrogate(),
    "pg/vanilla on-policy (log_prob==old)": surrogate(logprobs=OLD_LOGPROBS),
    "pg/vanilla row fully masked": surrogate(mask=ONE_ROW_MASKED),
    "pg/vanilla huge ratio (+-50 log ratio)": surrogate(logprobs=FAR_APART),
    "pg/gspo": surrogate("gspo"),
    "pg/gspo is_weights": surrogate("gspo"),
    "pg/cispo is_weights": surrogate("cispo"),
    "pg/gpg": example(gpg),
    "pg/gpg is_weights": example(gpg),
    "pg/reinforce": example(gpg, "sequence_sum", old_logprobs=batch("rollout_log_probs")),
    "pg/reinforce is_weights": example(gpg, "sequence_sum", old_logprobs=batch("rollout_log_probs")),
    "pg/sapo is_weights": example(sapo),
    "pg/sapo tau 2/3": example(partial(sapo, tau_positive=2.0, tau_negative=3.0)),
    "pg/dppo_tv": example(partial(dppo, **DPPO)),
    "pg/dppo_tv is_weights": example(partial(dppo, **DPPO)),
    "pg/dppo_kl is_weights": example(partial(dppo, divergence=binary_kl, **DPPO)),
    "pg/clip_cov lb=100 (nothing selected)": nothing_to_draw,
}


# --- where ours is another value, on purpose --------------------------------------------------------------------------


def corrected_by_a_geometric_mean(vector: dict) -> None:
    """verl corrects the loss of a response by the geometric mean of its tokens' weights. A mask makes one of them 0,
    and with it nearly the whole product; and importance weights are averaged, not multiplied and rooted: so it is the
    mean here, as for every loss. With verl's mean as the correction, loss and gradient are verl's."""
    loss = FunctionLoss(partial(gmpo, clip=0.2), "sequence_mean")
    lengths = MASK.sum(dim=1, keepdim=True)
    weights = torch.where(MASK, batch("rollout_is_weights"), 1.0)
    geometric = (weights.log().sum(dim=1, keepdim=True) / lengths).exp().expand_as(weights)
    output, gradient = evaluate(loss, vector, correction=geometric)
    assert_same_gradient_and_loss(vector, output, gradient)
    arithmetic = (torch.where(MASK, weights, 0.0).sum(dim=1, keepdim=True) / lengths).expand_as(weights)
    ours, expected = evaluate(loss, vector), evaluate(loss, vector, correction=arithmetic)
    torch.testing.assert_close(ours[0].loss, expected[0].loss)
    torch.testing.assert_close(ours[1], expected[1])
    assert (ours[1] - gradient).abs().max() > 1e-4


def drawn_before_the_cut(vector: dict) -> None:
    """verl draws in each micro-batch, from a generator that all share, among tokens that the clip range has not stopped
    already; ours are drawn once for the step, when none is stopped. As many, in the same range; the others' gradients
    are the same."""
    bounds = literal(vector)["config"]["policy_loss"]
    low, high, share = (bounds[f"clip_cov_{name}"] for name in ("lb", "ub", "ratio"))
    advantages = clip_cov(ADVANTAGES, LOGPROBS, MASK, low=low, high=high, share=share, seed=0)
    _, gradient = evaluate(ClippedSurrogate(), vector, advantages=advantages)
    _, plain = evaluate(ClippedSurrogate(), vector)
    theirs = tensor(vector["output"]["dloss_dlogprob"])
    covariance = (ADVANTAGES - ADVANTAGES[MASK].mean()) * (LOGPROBS - LOGPROBS[MASK].mean())
    drawn = MASK & advantages.eq(0.0)
    drawn_by_verl = MASK & plain.ne(0.0) & theirs.eq(0.0)
    assert drawn.sum() == drawn_by_verl.sum() == int(0.2 * 31)
    for tokens in (drawn, drawn_by_verl):
        assert ((covariance[tokens] > low) & (covariance[tokens] < high)).all()
    torch.testing.assert_close(theirs[~drawn_by_verl], plain[~drawn_by_verl], **CLOSE)
    torch.testing.assert_close(gradient, torch.where(drawn, 0.0, plain))


def penalized_by_old_logprobs(vector: dict) -> None:
    """verl takes the covariance with the log-probs of the moment, in each micro-batch; ours, with those that the step
    began with, is settled before anything is cut. Of the recorded batch it is one token here and there, and another."""
    loss = kl_cov(ADVANTAGES, OLD_LOGPROBS, MASK, coef=0.1)
    output, gradient = evaluate(FunctionLoss(loss), vector)
    theirs = tensor(vector["output"]["dloss_dlogprob"])
    log_ratio = LOGPROBS - OLD_LOGPROBS
    plain = torch.where(MASK, -ADVANTAGES * log_ratio.exp() / 31, 0.0)
    for found, logprobs in ((gradient, OLD_LOGPROBS), (theirs, LOGPROBS)):
        covariance = (ADVANTAGES - ADVANTAGES[MASK].mean()) * (logprobs - logprobs[MASK].mean())
        highest = covariance == covariance[MASK].max()
        penalty = torch.where(highest, 0.1 * log_ratio.sign() / 31, 0.0)
        torch.testing.assert_close(found, plain + penalty, **CLOSE)
        value = plain.sum() + torch.where(highest, 0.1 * log_ratio.abs() / 31, 0.0).sum()
        recorded = output.loss.detach() if found is gradient else tensor(vector["output"]["loss"])
        torch.testing.assert_close(recorded, value, **CLOSE)


DIFFERS: dict[str, Callable[[dict], None]] = {
    "pg/geo_mean is_weights": corrected_by_a_geometric_mean,
    "pg/clip_cov ratio=.2 lb=-1 ub=5 seed=0": drawn_before_the_cut,
    "pg/kl_cov defaults": penalized_by_old_logprobs,
}

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "DRO learns a value function by the same loss; without one it is gpg with a quadratic penalty": family("pg/dro"),
    "bypass mode is no loss: algorithm.old_logprobs=rollout takes the ratio to the engine, for each of them": (
        "pg/bypass_mode bogus is=token rs=seq_mean_k3<0.15",
    ),
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
    assert sorted(listed) == sorted(family("pg/"))
