"""The weights of a model that is spread over several ranks: each has some rows of every tensor, in float32.

FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers a layer's weights, in the dtype that it computes in, shortly before
the layer runs, and frees them afterwards. Gradients are summed over the ranks in float32 after each backward pass, and
each rank keeps those of its own rows. The numbers are those of `MasterWeights` on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tandem.errors import ModelError
from tandem.model.precision import head_parameters
from tandem.model.ranks import Ranks
from tandem.model.shards import Shard
from tandem.model.skeleton import materialise
from tandem.trainer.packed_model import PackedModel
from tandem.trainer.weights import Collector, local_gradient_norm


def training_mesh(ranks: Ranks, *, replicas: int, device: torch.device) -> DeviceMesh:
    """How ranks share a model: `replicas` times the whole of it, each spread over neighbouring ranks.

    Args:
        ranks: All of them; a collective call.
        replicas: Divides their number.
        device: Its type decides what the ranks talk over.

    Returns:
        One dimension, `shard`; or `replica` and `shard` if there are several replicas.
    """
    if replicas == 1:
        return init_device_mesh(device.type, (ranks.size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicas, ranks.size // replicas), mesh_dim_names=("replica", "shard"))


class ShardedWeights:
    """`Weights` on several ranks. It makes `packed` an FSDP module, with memory for this rank's rows, of any content.

    Parameters that need no gradients, such as a reference's, are spread in the same way, in the dtype that they have.

    Args:
        packed: Around a `skeleton`. Its `body_dtype` is what everything but the head computes in.
        mesh: From `training_mesh`.
        head_dtype: Of the output embeddings, and of the input embeddings where both are one tensor.
        device: Where this rank computes.

    Raises:
        ModelError: The model's layers cannot be found.
    """

    def __init__(self, packed: PackedModel, mesh: DeviceMesh, *, head_dtype: torch.dtype, device: torch.device) -> None:
        _spread(packed, mesh, head_dtype)
        packed.to_empty(device=device)  # in place: FSDP and tied modules keep seeing the same parameters
        materialise(packed.model, device)
        self._group = mesh.get_group("shard")
        self._device = device
        spread = dict(packed.model.named_parameters())  # a tied tensor is listed once
        self._every = {name: _own_rows(parameter) for name, parameter in spread.items()}
        self._masters = {name: own for name, own in self._every.items() if own.requires_grad}
        self._shards = {name: _as_shard(own, spread[name].shape, mesh) for name, own in self._every.items()}
        self._collector = Collector(self._masters, {name: spread[name] for name in self._masters})

    def parameters(self) -> Iterator[nn.Parameter]:
        """See `Weights`."""
        return iter(self._masters.values())

    def shards(self) -> Mapping[str, Shard]:
        """See `Weights`."""
        return {name: self._shards[name] for name in self._masters}

    def every_shard(self) -> Mapping[str, Shard]:
        """See `Weights`."""
        return self._shards

    def collecting(self) -> AbstractContextManager[None]:
        """See `Weights`."""
        return self._collector.collecting()

    def gradient_norm(self) -> Float[Tensor, ""]:
        """See `Weights`. Replicas have equal gradients and do not count again."""
        own = local_gradient_norm(self.parameters()).to(self._device, torch.float64)
        norms = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(norms, own, group=self._group)
        return torch.linalg.vector_norm(torch.stack(norms)).float()

    def write_back(self) -> None:
        """Nothing to do: FSDP rounds the masters when it gathers them."""

    def freeable(self) -> list[Tensor]:
        """See `Weights`: all of them, and the frozen ones."""
        return list(self._every.values())


def _spread(packed: PackedModel, mesh: DeviceMesh, head_dtype: torch.dtype) -> None:
    """Make groups of parameters that are gathered together: each layer, each module beside them, and the head."""
    of_head = head_parameters(packed.model)
    for module in gathered_parts(packed.model):
        if of_head.isdisjoint(module.parameters()):
            _make_group(module, mesh, packed.body_dtype)
    _make_group(packed, mesh, head_dtype)  # what is left: the head, with the embedding that is tied to it
    for module in packed.modules():  # neither setting reaches the modules inside
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds
            module.set_gradient_divide_factor(1.0)
    packed.register_forward_hook(_let_go)


def _make_group(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def gathered_parts(model: PreTrainedModel) -> list[nn.Module]:
    """What is gathered at once: each layer, and every module beside them that has parameters of its own.

    Raises:
        ModelError: There is no list of layers.
    """
    count = model.config.num_hidden_layers
    modules = list(model.base_model.modules())
    for layers in modules:
        if isinstance(layers, nn.ModuleList) and len(layers) == count:
            inside = set(layers.modules())
            beside = [each for each in modules if each not in inside and list(each.parameters(recurse=False))]
            return [*layers, *beside]
    raise ModelError(
        f"{type(model).__name__} has no list of its {count} layers, by which it could be spread over ranks",
        remedy="train it with cluster.num_workers=1",
    )


def _let_go(packed: FSDPModule, args: object, output: object) -> None:
    """FSDP keeps the root's weights for the backward pass that it expects; without one they would stay, and get old."""
    if not torch.is_grad_enabled():
        packed.reshard()


def _own_rows(parameter: Tensor) -> nn.Parameter:
    """A plain parameter that shares memory with this rank's part."""
    assert isinstance(parameter, DTensor)
    return nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)


def _as_shard(own: nn.Parameter, shape: torch.Size, mesh: DeviceMesh) -> Shard:
    """FSDP gives each rank the same number of rows, rounded up; the last ones may have fewer, or none."""
    rows_each = -(-shape[0] // mesh["shard"].size())
    first_row = min(mesh.get_local_rank("shard") * rows_each, shape[0])
    is_first_replica = mesh.ndim == 1 or mesh.get_local_rank("replica") == 0
    return Shard(own, tuple(shape), first_row, primary=is_first_replica)
