"""Linear layers of a model with their weights in oneDNN's own layout, for as long as the engine is awake.

`F.linear` lays the weight out anew at each call, which a decode step of a few rows cannot pay off: with weights packed
once, the products of a step take two thirds of the time in float32 (docs/log.md). The copy takes as much memory as the
gradients do, which are not there during a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import TensorParallelLayer

_ROWS = 32  # what oneDNN optimises the layout for; constant, so that a product's bits do not depend on the batch
_SMALLEST = 2**16  # weights below this are bound by the overhead of a call


class PackedLinears:
    """Copies of a model's large linear weights. As they were at its creation: create it anew after a change.

    Args:
        model: The layers. Nothing is packed on other devices than CPUs.
        slices: Those of which this rank has a slice only, with what is to be done around their products;
            see `tandem.model.tensor_parallel.sliced_linears`.
    """

    def __init__(self, model: nn.Module, slices: Mapping[nn.Module, TensorParallelLayer] | None = None) -> None:
        self._forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        for module in model.modules():
            if type(module) is not nn.Linear:  # a subclass may compute something else
                continue
            weight = _local(module.weight.detach())
            if _gains(weight):
                packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
                style = (slices or {}).get(module)
                self._forwards[module] = (
                    partial(_linear, packed, module.bias) if style is None else _sliced(module, packed, style)
                )

    def __len__(self) -> int:
        return len(self._forwards)

    @contextmanager
    def used(self) -> Generator[None]:
        """Within the block the model's linear layers compute with these weights. No gradients flow."""
        hidden = {module: vars(module).get("forward") for module in self._forwards}
        for module, forward in self._forwards.items():
            module.__dict__["forward"] = forward  # an attribute of the object hides the method of its class
        try:
            yield
        finally:
            for module, forward in hidden.items():
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gains(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.numel() >= _SMALLEST
        and torch.backends.mkldnn.is_available()
    )


def _sliced(module: nn.Linear, packed: Tensor, style: TensorParallelLayer) -> Callable[[Tensor], Tensor]:
    """The forward that the plan gives the module, around a product with the packed slice."""
    weight = module.weight
    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh

    def forward(x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        (local,), _ = style.transform_inputs_pre_forward(module, (x,), {}, mesh)
        with style.context_around_forward(module, mesh):  # no bias where partial products are yet to be added up
            output = _linear(packed, module.bias, local)
        return style.transform_output_post_forward(module, output, mesh)

    return forward


def _linear(packed: Tensor, bias: Float[Tensor, " out"] | None, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
