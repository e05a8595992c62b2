"""The models of tests/tiny.py are fit to find faults with: their answers depend on all that a fault could change."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tiny import ARCHITECTURES, tiny_model

IDS = torch.tensor([[5, 17, 2, 60, 33, 8]])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_logits_are_neither_uniform_nor_one_hot_and_depend_on_the_first_token(architecture: str) -> None:
    model = tiny_model(architecture)
    logprobs = model(IDS).logits[0].log_softmax(-1)
    assert bool(logprobs.isfinite().all())
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert entropy.max().item() < math.log(104) - 0.1
    assert logprobs.max().item() < math.log(0.9)
    other = IDS.clone()
    other[0, 0] = 40
    difference = model(other).logits[0].log_softmax(-1)[-1] - logprobs[-1]
    assert difference.abs().max().item() > 0.02


def test_the_seed_decides_the_weights() -> None:
    first, same, other = (tiny_model(seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
