"""The weights that the optimizer sees: float32, whatever the model computes in.

At a learning rate of 1e-6 a bfloat16 weight swallows 98 % of its updates: they are smaller than half its last bit.
So the optimizer works on float32 masters; the model computes on copies in its own dtype, gradients are added up in
float32, and after each optimizer step the masters are rounded into the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def round_weights(model: PreTrainedModel, *, body_dtype: torch.dtype, head_dtype: torch.dtype) -> dict[str, Tensor]:
    """Change the parameters of a float32 model to what it computes in, in place.

    Args:
        model: Loaded in float32.
        body_dtype: Of everything but the head.
        head_dtype: Of the output embeddings, and of the input embeddings where both are one tensor.

    Returns:
        By name, the float32 tensors that were replaced. They are free once nobody keeps them.
    """
    head = model.get_output_embeddings()
    head_parameters = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    originals: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        dtype = head_dtype if id(parameter) in head_parameters else body_dtype
        if dtype != torch.float32:
            originals[name] = parameter.detach()
            parameter.data = originals[name].to(dtype)
    return originals


class MasterWeights:
    """float32 masters of a model's parameters. Where the model already computes in float32, they are the same tensors.

    Args:
        model, body_dtype, head_dtype: See `round_weights`.
    """

    def __init__(self, model: PreTrainedModel, *, body_dtype: torch.dtype, head_dtype: torch.dtype) -> None:
        self._compute: dict[str, nn.Parameter] = dict(model.named_parameters())  # a tied tensor is listed once
        self._masters: dict[str, nn.Parameter] = dict(self._compute)
        self._is_collecting = False
        for name, original in round_weights(model, body_dtype=body_dtype, head_dtype=head_dtype).items():
            self._masters[name] = nn.Parameter(original)
            self._compute[name].register_post_accumulate_grad_hook(self._collector(name))

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            if not self._is_collecting:
                return
            master = self._masters[name]
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return collect

    @contextmanager
    def collecting(self) -> Generator[None]:
        """Gradients of the block reach the masters. Those of a backward pass elsewhere stay where PyTorch puts them.

        It begins without gradients, and leaves none, whatever ends it: not even those of half an update.
        """
        self._clear()
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False
            self._clear()

    def _clear(self) -> None:
        for parameter in (*self._compute.values(), *self._masters.values()):
            parameter.grad = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer updates."""
        return iter(self._masters.values())

    def named(self) -> Mapping[str, nn.Parameter]:
        """Masters by the model's own names, tied tensors once."""
        return self._masters

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the weights that the model computes with."""
        for name, master in self._masters.items():
            compute = self._compute[name]
            if compute is not master:
                compute.copy_(master)
