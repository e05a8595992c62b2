"""A model spread over ranks, with the weights of a whole one, for tests that run on each rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.model.attention import NAMES, register
from tandem.model.ranks import Ranks
from tandem.model.shards import Shard
from tandem.model.skeleton import skeleton
from tandem.trainer.fsdp import ShardedWeights, training_mesh
from tandem.trainer.policy import Policy
from tandem.trainer.weights import Weights
from tests.tiny import tiny_model

CPU = torch.device("cpu")


def whole_model(
    architecture: str = "Qwen3ForCausalLM", *, tie: bool = True, overrides: Mapping[str, object] | None = None
) -> PreTrainedModel:
    """A tiny model with Tandem's attention, the same on every rank."""
    register()
    return tiny_model(architecture, tie=tie, attention=NAMES["sdpa"], overrides=overrides)


def spread(
    ranks: Ranks,
    model: PreTrainedModel,
    *,
    replicas: int = 1,
    body_dtype: torch.dtype = torch.float32,
    chunk_tokens: int = 1024,
    checkpointing: bool = False,
    trainable: bool = True,
) -> tuple[Policy, ShardedWeights]:
    """The same model, each rank with some of its rows; the head is float32."""
    pieces = skeleton(model.config).requires_grad_(trainable)
    if checkpointing:
        pieces.gradient_checkpointing_enable({"use_reentrant": False})
        pieces.train()
    policy = Policy(pieces, chunk_tokens=chunk_tokens, body_dtype=body_dtype)
    mesh = training_mesh(ranks, replicas=replicas, device=CPU)
    weights = ShardedWeights(policy, mesh, head_dtype=torch.float32, device=CPU)
    for name, shard in weights.every_shard().items():
        shard.tensor.data.copy_(rows_of(shard, model.get_parameter(name)))
    return policy, weights


def rows_of(shard: Shard, whole: Tensor) -> Tensor:
    """The rows of a whole tensor that a shard stands for."""
    return whole.detach()[shard.first_row : shard.first_row + len(shard.tensor)]


def contents(weights: Weights) -> dict[str, Tensor]:
    """Copies of this rank's rows, by name."""
    return {name: shard.tensor.detach().clone() for name, shard in weights.shards().items()}


def gradients(weights: Weights) -> dict[str, Tensor]:
    """Copies of the gradients of this rank's rows, by name."""
    return {name: gradient_of(shard.tensor).clone() for name, shard in weights.shards().items()}


def gradient_of(parameter: Tensor) -> Tensor:
    """It has one."""
    assert parameter.grad is not None
    return parameter.grad


def difference(rows: Mapping[str, Tensor], whole: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> float:
    """Between this rank's rows of all tensors and the same ones of whole tensors: norm of the difference over norm."""
    mine = torch.cat([rows[name].flatten() for name in shards])
    expected = torch.cat([rows_of(shard, whole[name]).flatten() for name, shard in shards.items()])
    return float((mine - expected).norm() / expected.norm())


def held_bytes() -> int:
    """Memory of all tensors that this process has; those that share some count once."""
    import gc

    storages = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu":
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
