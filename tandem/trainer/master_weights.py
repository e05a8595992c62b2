"""The weights that the optimizer sees: float32, whatever the model computes in.

At a learning rate of 1e-6 a bfloat16 weight swallows 98 % of its updates: they are smaller than half its last bit.
So the optimizer works on float32 masters; the model computes on copies in its own dtype, gradients are added up in
float32, and after each optimizer step the masters are rounded into the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.model.precision import round_weights
from tandem.model.shards import Shard
from tandem.trainer.weights import Collector, local_gradient_norm


class MasterWeights:
    """float32 masters of a whole model's parameters: `Weights` on one rank.

    Where the model already computes in float32, masters and parameters are the same tensors. Parameters that need no
    gradients have no masters.

    Args:
        model, body_dtype, head_dtype: See `round_weights`.
    """

    def __init__(self, model: PreTrainedModel, *, body_dtype: torch.dtype, head_dtype: torch.dtype) -> None:
        self._every: dict[str, nn.Parameter] = dict(model.named_parameters())  # a tied tensor is listed once
        self._compute = {name: parameter for name, parameter in self._every.items() if parameter.requires_grad}
        self._masters = dict(self._compute)
        for name, original in round_weights(model, body_dtype=body_dtype, head_dtype=head_dtype).items():
            self._masters[name] = nn.Parameter(original)
        self._collector = Collector(self._masters, self._compute)

    def parameters(self) -> Iterator[nn.Parameter]:
        """See `Weights`."""
        return iter(self._masters.values())

    def shards(self) -> Mapping[str, Shard]:
        """See `Weights`: all rows of each master."""
        return {name: Shard.whole(master) for name, master in self._masters.items()}

    def every_shard(self) -> Mapping[str, Shard]:
        """See `Weights`."""
        return {name: Shard.whole(self._masters.get(name, parameter)) for name, parameter in self._every.items()}

    def collecting(self) -> AbstractContextManager[None]:
        """See `Weights`."""
        return self._collector.collecting()

    def gradient_norm(self) -> Float[Tensor, ""]:
        """See `Weights`."""
        return local_gradient_norm(self.parameters())

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the weights that the model computes with."""
        for name, master in self._separate():
            self._compute[name].copy_(master)

    def freeable(self) -> list[Tensor]:
        """See `Weights`: the masters that are not the model's own tensors."""
        return [master for _, master in self._separate()]

    def _separate(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, master) for name, master in self._masters.items() if master is not self._compute[name])
