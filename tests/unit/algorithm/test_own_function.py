"""Advantage and loss functions of a user's own: what is wrong with them is said, with a remedy."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path

import pytest
import torch

import tandem as td
from tandem.algorithm.losses import ClippedSurrogate, as_loss
from tandem.algorithm.masked import token_weights
from tandem.algorithm.own_function import check_function
from tandem.algorithm.protocols import AdvantageFunction, LossFunction
from tandem.errors import FunctionError, SeveralErrors
from tests.loop.small_run import metrics_of, small_config


def matrices():
    logprobs = torch.linspace(-2.0, -0.1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    mask = torch.tensor([[True, True, True], [True, True, False]])
    weights = token_weights("token_mean", mask, dtype=torch.float64)
    advantages = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    given = {"logprobs": logprobs, "old_logprobs": logprobs.detach() - 0.1, "advantages": advantages}
    return {**given, "response_mask": mask, "weights": weights}


def test_a_function_gets_what_it_names(tmp_path: Path) -> None:
    """No `**_` is needed, for neither."""
    config = small_config(tmp_path, {"run": {"steps": 1, "folder": str(tmp_path / "run")}})
    run = td.train(
        td.config_from_dict(config),
        advantage=lambda rewards: rewards - rewards.mean(),
        loss=lambda logprobs, advantages: -advantages * logprobs,
    )
    assert metrics_of(run)[-1]["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (td.FunctionLoss, "FunctionLoss'> is a class"),
        (lambda logprob: logprob, "asks for logprob, which Tandem does not know"),
        (lambda logprobs, /: logprobs, "asks for logprobs, which Tandem does not know"),
        (max, "has no signature that Python can show"),
    ],
)
def test_what_cannot_be_called_is_told_when_the_loss_is_made(function, message):
    for make in (td.FunctionLoss, functools.partial(as_loss, like=ClippedSurrogate())):
        with pytest.raises(FunctionError, match=message) as caught:
            make(function)
        assert caught.value.remedy


def test_a_number_is_no_function():
    with pytest.raises(FunctionError, match="the loss 5 is no function"):
        check_function("loss", 5, LossFunction)


def test_several_wrong_functions_are_told_before_a_run_begins(tmp_path: Path) -> None:
    config = td.config_from_dict(small_config(tmp_path, {"run": {"folder": str(tmp_path / "run")}}))
    with pytest.raises(SeveralErrors) as caught:
        td.train(config, advantage=lambda reward: reward, loss=td.FunctionLoss)
    assert "asks for reward, which Tandem does not know" in str(caught.value)
    assert "may name rewards, valid, group_ids, response_mask, components, baselines, values" in str(caught.value)
    assert "FunctionLoss'> is a class" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_parameters_with_a_default_and_objects_are_fine():
    class Named:
        def __call__(self, *, logprobs, coef=2.0):
            return coef * logprobs

    for function in (Named(), functools.partial(lambda logprobs, *, coef: coef * logprobs, coef=2.0)):
        check_function("loss", function, LossFunction)
        given = matrices()
        expected = (given["weights"] * 2.0 * given["logprobs"]).sum()
        torch.testing.assert_close(td.FunctionLoss(function)(**given).loss, expected)
    check_function("advantage", lambda rewards, **_: rewards, AdvantageFunction)


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (lambda logprobs, entropy: logprobs - entropy, "needs_entropy=True"),
        (lambda logprobs, ref_logprobs: logprobs + ref_logprobs.exp(), "needs_reference=True"),
    ],
)
def test_a_loss_that_needs_what_is_not_there_is_told_how_to_ask_for_it(function, remedy):
    with pytest.raises(FunctionError, match="are None here") as caught:
        td.FunctionLoss(function)(**matrices())
    assert remedy in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_mistake_of_another_kind_is_shown_as_it_is():
    with pytest.raises(AttributeError, match="no_such"):
        td.FunctionLoss(lambda logprobs, **_: logprobs.no_such)(**matrices())


def test_a_loss_may_change_what_it_is_given():
    def in_place(*, logprobs, advantages, response_mask, weights, **_):
        logprobs.mul_(advantages.neg_())
        weights.zero_()
        response_mask.zero_()
        return logprobs

    expected = td.FunctionLoss(lambda logprobs, advantages: -advantages * logprobs)(**matrices())
    given = matrices()
    found = td.FunctionLoss(in_place)(**given)
    found.loss.backward()
    assert torch.equal(found.loss, expected.loss)
    assert found.metrics == expected.metrics
    assert torch.equal(given["logprobs"].grad, (-given["weights"] * given["advantages"]))
