"""The worked example of the notes that Tandem starts from holds exactly (contract 1)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tandem.algorithm.advantages import grpo_advantages
from tandem.algorithm.losses import grpo_loss
from tandem.algorithm.masked import token_weights
from tandem.algorithm.surrogates import clipped_surrogate

NOTES = json.loads((Path(__file__).parents[1] / "vectors" / "notes.json").read_text(encoding="utf-8"))
EXACT = {"rel": 0, "abs": 1e-12}


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", NOTES["advantages"])
def test_advantages(case):
    rewards = double(*case["rewards"])
    advantages = grpo_advantages(rewards, torch.zeros(len(rewards), dtype=torch.int64))
    assert advantages.tolist() == pytest.approx(case["expected"], **EXACT)


@pytest.mark.parametrize("case", NOTES["policy_gradient_without_ratio"])
def test_policy_gradient_without_ratio(case):
    """-A * logprob is linear in the log-prob, so it is gradient * logprob; on policy, the surrogate's gradient."""
    advantage = double(case["reward_or_advantage"])
    logprob = double(case["logprob"]).requires_grad_()
    clipped_surrogate(logprob, logprob.detach(), advantage).loss.sum().backward()
    assert (logprob.grad * logprob.detach()).item() == pytest.approx(case["expected_loss"], **EXACT)


def test_loss_of_one_response():
    case = NOTES["response_loss"]
    logprobs = double(*case["logprobs"])[None].requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    weights = token_weights("sequence_mean", mask, dtype=torch.float64)
    assert -(weights * case["advantage"] * logprobs).sum().item() == pytest.approx(case["expected"], **EXACT)
    loss = grpo_loss(logprobs, logprobs.detach(), double(case["advantage"]), mask, aggregation="sequence_mean")
    loss.backward()
    # The surrogate's gradient at ratio 1 is that of -A * mean(logprobs).
    assert logprobs.grad.flatten().tolist() == pytest.approx([-case["advantage"] / 4] * 4, **EXACT)
    assert (logprobs.grad * logprobs.detach()).sum().item() == pytest.approx(case["expected"], **EXACT)


@pytest.mark.parametrize("case", NOTES["clipped_surrogate"])
def test_clipped_surrogate(case):
    logprob = double(-0.7).requires_grad_()
    old_logprob = double(-0.7 - math.log(case["ratio"]))
    token = clipped_surrogate(logprob, old_logprob, double(case["advantage"]), clip_low=0.2, clip_high=0.2)
    token.loss.sum().backward()
    assert -token.loss.item() == pytest.approx(case["surrogate"], **EXACT)
    if case["gradient_flows"]:
        assert logprob.grad.item() == pytest.approx(-case["advantage"] * case["ratio"], **EXACT)
    else:
        assert logprob.grad.item() == 0.0
