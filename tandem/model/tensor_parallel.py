"""Tensor parallelism of the engine's model, by the plan that transformers has for its architecture.

Consecutive ranks form a group that holds one copy of the weights. Of most tensors each rank has a slice: some
attention heads, some neurons of the MLP, some tokens of the vocabulary. What flows between the layers is the same on
every rank, to the bit, and so are the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    TensorParallelLayer,
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)

from tandem.errors import ModelError
from tandem.model.precision import round_weights
from tandem.model.ranks import Ranks
from tandem.model.skeleton import skeleton

# The styles of transformers' plans that the tests hold to one rank, by what they cut of a weight [..., out, in].
_OUTPUTS = frozenset({"colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"})
_INPUTS = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input"})
_VOCABULARY = "embedding_rowwise"
_NOTHING = frozenset({"replicated_with_grad_allreduce", "moe_tp_experts"})
_STYLES = _OUTPUTS | _INPUTS | _NOTHING | {_VOCABULARY}

_FIELDS = ("vocab_size", "intermediate_size", "moe_intermediate_size")  # of the config, to name a size by


def tensor_parallel_problems(model: PreTrainedModel, size: int) -> list[ModelError]:
    """What speaks against `size` ranks for one copy of this model, a `skeleton`; names the sizes that are valid."""
    if size == 1:
        return []
    name, cuts = type(model).__name__, list(_cuts(model))
    unknown = sorted({style for _, _, style in cuts} - _STYLES)
    if not any(style in _OUTPUTS | _INPUTS for _, _, style in cuts):
        against = f"transformers has no tensor-parallel plan for {name}"
    elif unknown:
        against = f"the tensor-parallel plan of {name} has styles that Tandem does not serve: {', '.join(unknown)}"
    elif _tied_apart(model):
        against = f"the tensor-parallel plan of {name} cuts the tied embedding and head in different ways"
    else:
        return _indivisible(model, size)
    return [ModelError(f"rollout.tensor_parallel: {against}", remedy="set rollout.tensor_parallel to 1")]


def _indivisible(model: PreTrainedModel, size: int) -> list[ModelError]:
    sizes = _sizes(model)
    against = [f"{name}={value}" for name, value in sizes.items() if value % size]
    if not against:
        return []
    common = math.gcd(*sizes.values())
    *others, last = [str(each) for each in range(1, common + 1) if common % each == 0]
    valid = f"{', '.join(others)} or {last}" if others else last
    return [
        ModelError(
            f"rollout.tensor_parallel is {size}, which does not divide {type(model).__name__}'s {', '.join(against)}",
            remedy=f"set rollout.tensor_parallel to {valid}",
        )
    ]


def _sizes(model: PreTrainedModel) -> dict[str, int]:
    """What a group's number of ranks must divide, by the config's name for it, else by the weight's."""
    config = model.config
    fields = {value: field for field in _FIELDS if (value := config.to_dict().get(field)) is not None}
    sizes: dict[str, int] = {}
    for name, parameter, style in _cuts(model):
        dim = _cut_dim(parameter, style)
        if dim is None:
            continue
        if "att" in name and style in ("colwise", "rowwise"):  # with the other styles a rank computes all heads
            sizes["num_attention_heads"] = config.num_attention_heads
            sizes["num_key_value_heads"] = config.num_key_value_heads
        else:
            length = parameter.shape[dim] // (2 if style == "packed_colwise" else 1)  # gate and up, each on its own
            sizes[fields.get(length, name)] = length
    return sizes


def _cuts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter, str]]:
    """The parameters that the plan names, by themselves or by their modules; a tied one under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        style = _style(model, name) or _style(model, name.rpartition(".")[0])
        if style is not None:
            yield name, parameter, style


def _style(model: PreTrainedModel, name: str) -> str | None:
    return model.tp_plan.get(replace_layer_number_by_wildcard(name))


def _cut_dim(parameter: nn.Parameter, style: str | None) -> int | None:
    """The dimension that is divided among the ranks; None where each has the whole."""
    if style == _VOCABULARY:
        return 0
    if style in _OUTPUTS:
        return max(parameter.ndim - 2, 0)
    if style in _INPUTS and parameter.ndim > 1:  # a bias is added to the sum
        return parameter.ndim - 1
    return None


def _tied_apart(model: PreTrainedModel) -> bool:
    """Whether no slice could serve both names of a tensor."""
    styles = {name: style for name, _, style in _cuts(model)}
    dims: dict[int, set[int | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        dims.setdefault(id(parameter), set()).add(_cut_dim(parameter, styles.get(name)))
    return any(len(each) > 1 for each in dims.values())


def tensor_parallel_mesh(ranks: Ranks, size: int, device: torch.device) -> DeviceMesh | None:
    """This rank's group of `size` consecutive ranks; None where each rank is a group. Call it on all ranks."""
    if size == 1:
        return None
    return init_device_mesh(device.type, (ranks.size // size, size), mesh_dim_names=("replica", "tp"))["tp"]


def engine_skeleton(
    config: PreTrainedConfig,
    *,
    attention: str,
    tp_mesh: DeviceMesh | None,
    body_dtype: torch.dtype,
    head_dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A `skeleton` for the rollout: in the dtypes that the trainer computes in, without gradients, cut by the plan.

    Parameters that are cut are DTensors on `tp_mesh`. `materialise` gives them memory, `release` takes it back.

    Args:
        config: Of the model; see `tensor_parallel_problems` for those that can be cut.
        attention: Name of the attention function, `attention_name(config.model)`.
        tp_mesh: The ranks that hold one copy of the weights. None = this rank alone.
        body_dtype, head_dtype: See `round_weights`.
        trust_remote_code: Code shipped with the model may run.
    """
    model = skeleton(config, attention=attention, trust_remote_code=trust_remote_code).requires_grad_(False)
    round_weights(model, body_dtype=body_dtype, head_dtype=head_dtype)
    if tp_mesh is not None:
        apply_tensor_parallelism(model, tp_mesh)
        model.tie_weights()  # the plan has cut the embedding and the head one by one
    return model


def sliced_linears(model: PreTrainedModel) -> dict[nn.Module, TensorParallelLayer]:
    """What the plan does around each linear layer of which this rank has a slice; empty for a whole model."""
    return {
        module: ALL_PARALLEL_STYLES[style]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor)
        if (style := _style(model, name)) is not None
    }
