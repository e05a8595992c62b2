"""Linear layers of a model with their weights in oneDNN's own layout, for as long as the engine is awake.

`F.linear` lays the weight out anew at each call, which a decode step of a few rows cannot pay off: with weights packed
once, the products of a step take two thirds of the time in float32 (docs/log.md). The copy takes as much memory as the
gradients do, which are not there during a rollout.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

_ROWS = 32  # what oneDNN optimises the layout for; constant, so that a product's bits do not depend on the batch
_SMALLEST = 2**16  # weights below this are bound by the overhead of a call


class PackedLinears:
    """Copies of a model's large linear weights. As they were at its creation: create it anew after a change."""

    def __init__(self, model: nn.Module) -> None:
        """Empty, and without any effect, on other devices than CPUs."""
        self._forwards = {
            module: partial(
                _linear, torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), _ROWS), module.bias
            )
            for module in model.modules()
            if type(module) is nn.Linear  # a subclass may compute something else
            and module.weight.device.type == "cpu"
            and module.weight.dtype in (torch.float32, torch.bfloat16)
            and module.weight.numel() >= _SMALLEST
            and torch.backends.mkldnn.is_available()
        }

    def __len__(self) -> int:
        return len(self._forwards)

    @contextmanager
    def used(self) -> Generator[None]:
        """Within the block the model's linear layers compute with these weights. No gradients flow."""
        for module, forward in self._forwards.items():
            module.__dict__["forward"] = forward  # an attribute of the object hides the method of its class
        try:
            yield
        finally:
            for module in self._forwards:
                del module.__dict__["forward"]


def _linear(packed: Tensor, bias: Float[Tensor, " out"] | None, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
