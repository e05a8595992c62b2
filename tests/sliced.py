"""Engines whose model is cut over the ranks of a group, with the weights of a whole one."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from tandem.model.attention import NAMES
from tandem.model.ranks import Ranks
from tandem.model.skeleton import materialise
from tandem.model.tensor_parallel import engine_skeleton, tensor_parallel_mesh
from tandem.rollout.embedded import EmbeddedEngine
from tests.tiny import tiny_tokenizer

CPU = torch.device("cpu")


def sliced_engine(
    ranks: Ranks,
    tensor_parallel: int,
    whole: PreTrainedModel,
    *,
    body_dtype: torch.dtype = torch.float32,
    eos_ids: tuple[int, ...] = (1,),
    max_concurrent: int = 8,
) -> EmbeddedEngine:
    """An engine of groups of `tensor_parallel` ranks. Its head is in float32."""
    mesh = tensor_parallel_mesh(ranks, tensor_parallel, CPU)
    model = engine_skeleton(
        whole.config,
        attention=NAMES["sdpa"],
        tp_mesh=mesh,
        body_dtype=body_dtype,
        head_dtype=torch.float32,
    )
    materialise(model, CPU)
    fill(model, whole)
    return EmbeddedEngine(
        model,
        tiny_tokenizer(),
        eos_ids=eos_ids,
        max_concurrent=max_concurrent,
        lockstep=None if mesh is None else mesh.get_group(),
    )


@torch.no_grad()
def fill(model: PreTrainedModel, whole: PreTrainedModel) -> None:
    """Give every parameter its slice of the whole model's."""
    for name, parameter in model.named_parameters():
        tensor = whole.get_parameter(name).detach()
        if isinstance(parameter, DTensor):
            part = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(tensor)
