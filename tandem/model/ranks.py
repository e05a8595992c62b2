"""The processes that train one model together, as one of them sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process is `rank` of `size`. Alone (size 1) every collective returns what it was given.

    With more than one, `torch.distributed` is initialised: gloo for tensors on the CPU, NCCL for those on GPUs.
    Every rank must make the same calls in the same order.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1  # of them on this machine: they share its memory and its CPUs

    @property
    def alone(self) -> bool:
        """Whether there are no others: then no process group is needed."""
        return self.size == 1

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place of `tensor`; the same bits on every rank."""
        if not self.alone:
            dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def gather(self, value: T) -> list[T]:
        """What every rank has, in the order of the ranks. For small objects: they are pickled."""
        if self.alone:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return [each for each in values if each is not None]


ALONE = Ranks()
