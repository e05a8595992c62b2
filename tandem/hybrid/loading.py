"""A policy on this rank: the whole model where it is alone, its rows of every weight where there are others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.config.model import ModelConfig
from tandem.hybrid.worker_options import WorkerOptions
from tandem.model.adapter_files import Base, is_adapter, read_factors
from tandem.model.build import build_model, new_config
from tandem.model.file_names import FileNames
from tandem.model.hf import attention_name, load_model, load_shards, read_config
from tandem.model.lora import Lora
from tandem.model.precision import round_weights
from tandem.model.shards import Shard
from tandem.model.skeleton import skeleton
from tandem.model.source import resolve_model_path
from tandem.trainer.fsdp import ShardedWeights
from tandem.trainer.master_weights import MasterWeights
from tandem.trainer.policy import Policy
from tandem.trainer.weights import Weights

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Loaded:
    """A policy with its weights."""

    policy: Policy
    weights: Weights
    names: FileNames | None  # in the files of a model that is spread or adapted; None = the model itself tells
    lora: Lora | None = None  # its adapters; None = all weights are trained
    base: Base | None = None  # what it is without them; None = that has no files of its own


def load_policy(
    source: ModelConfig, options: WorkerOptions, tokenizer: PreTrainedTokenizerBase, mesh: DeviceMesh | None
) -> Loaded:
    """Load the model, or build it, with float32 weights to train.

    Args:
        source: Where it comes from.
        options: Of the worker.
        tokenizer: A new model has its size.
        mesh: Over which the weights are spread. None = this rank has all of them.

    Raises:
        ModelError: Weights are missing, or do not fit the config.
    """
    if mesh is not None:
        loaded = _spread_policy(source, options, tokenizer, mesh, trainable=True)
    else:
        model = _whole_model(source, options, tokenizer, options.device)
        names = FileNames(model) if source.lora_rank else None  # adapters change the names
        lora = Lora(model, source) if source.lora_rank else None
        weights = MasterWeights(model, body_dtype=options.dtype, head_dtype=options.head_dtype)
        loaded = Loaded(Policy(model, chunk_tokens=options.trainer.logits_chunk_tokens), weights, names, lora)
    if loaded.lora is None:
        return loaded
    _fill_adapters(loaded, options)
    on_its_own = source.path is not None and not is_adapter(resolve_model_path(source.path))
    return replace(loaded, base=Base.of(str(source.path)) if on_its_own else None)


def _fill_adapters(loaded: Loaded, options: WorkerOptions) -> None:
    """As a checkpoint has them, or as they begin."""
    assert loaded.lora is not None
    shards = loaded.weights.shards()
    if options.adapter is None:
        loaded.lora.begin(shards, seed=options.seed)
    else:
        read_factors(options.adapter, shards, loaded.lora.pieces)
    loaded.weights.write_back()


def load_reference(
    source: ModelConfig, options: WorkerOptions, tokenizer: PreTrainedTokenizerBase, mesh: DeviceMesh | None
) -> tuple[Policy, Sequence[Tensor]]:
    """The same for a policy that is never trained; with the tensors that hold its weights.

    Raises:
        ModelError: See `load_policy`.
    """
    if mesh is not None:
        loaded = _spread_policy(source, options, tokenizer, mesh, trainable=False)
        return loaded.policy, loaded.weights.freeable()
    model = _whole_model(source, options, tokenizer, options.device).requires_grad_(requires_grad=False)
    round_weights(model, body_dtype=options.dtype, head_dtype=options.head_dtype)
    return Policy(model, chunk_tokens=options.trainer.logits_chunk_tokens), list(model.parameters())


def _spread_policy(
    source: ModelConfig,
    options: WorkerOptions,
    tokenizer: PreTrainedTokenizerBase,
    mesh: DeviceMesh,
    *,
    trainable: bool,
) -> Loaded:
    model_config = read_config(source) if source.new is None else new_config(source.new, tokenizer)
    model = skeleton(model_config, attention=attention_name(source), trust_remote_code=source.trust_remote_code)
    model.requires_grad_(requires_grad=trainable)
    names = FileNames(model)
    lora = Lora(model, source) if trainable and source.lora_rank else None
    if lora is not None:  # what is frozen needs no more digits than the computation has
        round_weights(model, body_dtype=options.dtype, head_dtype=options.head_dtype, frozen_only=True)
    policy = Policy(model, chunk_tokens=options.trainer.logits_chunk_tokens, body_dtype=options.dtype)
    weights = ShardedWeights(policy, mesh, head_dtype=options.head_dtype, device=options.device)
    shards = weights.every_shard() if lora is None else lora.without_adapters(weights.every_shard())
    if source.new is None:
        load_shards(source, model, shards, names=names)
    else:
        _take_rows(_whole_model(source, options, tokenizer, _CPU), shards)
    return Loaded(policy, weights, names, lora)


def _whole_model(
    source: ModelConfig, options: WorkerOptions, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> PreTrainedModel:
    if source.new is None:
        model = load_model(source, device=device, dtype=torch.float32)
        if options.offload != "none":
            for parameter in model.parameters():  # their memory may be that of the file, which cannot be freed
                parameter.data = parameter.data.clone()
        return model
    return build_model(
        new_config(source.new, tokenizer), seed=options.seed, attention=attention_name(source), device=device
    )


@torch.no_grad()
def _take_rows(model: PreTrainedModel, shards: Mapping[str, Shard]) -> None:
    """A new model is small, and the recipe of its random weights cannot be followed for some rows only."""
    for name, parameter in model.named_parameters():
        shard = shards[name]
        shard.tensor.copy_(parameter[shard.first_row : shard.first_row + len(shard.tensor)])
