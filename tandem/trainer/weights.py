"""What the optimizer needs of a model's weights, on one rank (`master_weights`) or on several (`fsdp`)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.model.shards import Shard


@runtime_checkable
class Weights(Protocol):
    """The float32 weights of a model that are trained, or this rank's rows of them, and their gradients."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer of this rank updates: plain float32 tensors, some of which may have no rows."""
        ...

    def shards(self) -> Mapping[str, Shard]:
        """The same by the model's own names, tied tensors once. `Shard.tensor` is the parameter itself."""
        ...

    def every_shard(self) -> Mapping[str, Shard]:
        """Those, and the frozen ones, which are in the dtype of the computation."""
        ...

    def collecting(self) -> AbstractContextManager[None]:
        """Gradients of the block reach the parameters. Those of a backward pass elsewhere stay where PyTorch puts them.

        It begins without gradients, and leaves none, whatever ends it: not even those of half an update.
        """
        ...

    def gradient_norm(self) -> Float[Tensor, ""]:
        """The 2-norm of the whole model's gradient, the same bits on every rank. Every rank must call it."""
        ...

    def write_back(self) -> None:
        """Bring what the optimizer has changed to the weights that the model computes with."""
        ...

    def freeable(self) -> list[Tensor]:
        """Tensors that only the training phase needs. Between such phases their storages may be emptied in place."""
        ...


class Collector:
    """Moves gradients to the masters as they arrive, and adds them up there in float32.

    Args:
        masters: By name, float32 tensors.
        compute: By the same names, the leaves that get the gradients, or the masters themselves.
    """

    def __init__(self, masters: Mapping[str, nn.Parameter], compute: Mapping[str, nn.Parameter]) -> None:
        self._all = (*masters.values(), *compute.values())
        self._is_collecting = False
        for name, parameter in compute.items():
            if parameter is not masters[name] and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._hook(masters[name]))

    def _hook(self, master: nn.Parameter) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            if not self._is_collecting:
                return
            grad = parameter.grad
            assert grad is not None
            if isinstance(grad, DTensor):
                grad = grad.to_local()
            if master.grad is None:
                master.grad = grad.float()
            else:
                master.grad.add_(grad)
            parameter.grad = None

        return collect

    @contextmanager
    def collecting(self) -> Generator[None]:
        """See `Weights`."""
        self._clear()
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False
            self._clear()

    def _clear(self) -> None:
        for parameter in self._all:
            parameter.grad = None


def local_gradient_norm(parameters: Iterator[nn.Parameter]) -> Float[Tensor, ""]:
    """The 2-norm of the gradients that these parameters have."""
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
