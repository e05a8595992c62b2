"""Linear layers with packed weights: the same numbers, and only within the block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tandem.rollout.packed_linear import PackedLinears


def random_inputs(rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def large_and_small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(256, 300), nn.Linear(300, 8), nn.Linear(8, 9000, bias=False)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_are_the_same(dtype: torch.dtype) -> None:
    layers = large_and_small(dtype)
    packed = PackedLinears(layers)
    assert len(packed) == 2  # the small one stays
    inputs = random_inputs(40, 256, dtype)
    with torch.no_grad():
        expected = layers(inputs)
        with packed.used():
            batched, single = layers(inputs.view(8, 5, 256)), layers(inputs)
        assert torch.equal(layers(inputs), expected)
    torch.testing.assert_close(single, expected)
    assert torch.equal(batched.view(40, -1), single)
    assert all("forward" not in vars(layer) for layer in layers)


def test_a_row_does_not_depend_on_how_many_there_are() -> None:
    layers = large_and_small()[:1]
    inputs = random_inputs(512, 256)
    with torch.no_grad(), PackedLinears(layers).used():
        whole = layers(inputs)
        for rows in (8, 16, 24, 64, 200):
            assert torch.equal(layers(inputs[:rows]), whole[:rows])


def test_weights_are_those_of_the_creation_and_an_error_leaves_nothing_behind() -> None:
    layers = large_and_small()
    packed = PackedLinears(layers)
    inputs = random_inputs(8, 256)
    with torch.no_grad():
        before = layers(inputs)
        layers[2].weight.zero_()
        with packed.used():
            torch.testing.assert_close(layers(inputs), before)
        with PackedLinears(layers).used():
            assert not layers(inputs).any()
        with pytest.raises(KeyError), packed.used():
            raise KeyError
        assert not layers(inputs).any()
