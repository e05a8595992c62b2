"""Models of transformers: read the config, load the weights, save a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import custom_object_save

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.model.adapter_files import Base, find_base, is_adapter, read_deltas, write_factors
from tandem.model.attention import NAMES, register
from tandem.model.delta import Delta
from tandem.model.file_names import FileNames, saved_buffers
from tandem.model.lora import Lora
from tandem.model.shards import Shard
from tandem.model.source import check_hub_name, foreign_code, resolve_model_path, weights_folder
from tandem.model.tensor_files import MAX_FILE_BYTES, read, saved_dtype, write

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # that a config can name


def read_config(config: ModelConfig, *, key: str = "model.path") -> PreTrainedConfig:
    """The config of the model at `model.path`, with all randomness of training (dropout, router noise) set to 0.

    Args:
        config: Its `path` and `trust_remote_code` are used.
        key: The config key that gave the path, for messages.

    Raises:
        ModelError: It cannot be read, is unknown to transformers, or needs code that is shipped with the model.
    """
    if config.path is None:
        raise ModelError("no model is given", remedy="set model.path or model.new")
    path = resolve_model_path(config.path, key=key)
    if isinstance(path, str):
        check_hub_name(path, key)
    try:
        fields, _ = PreTrainedConfig.get_config_dict(path)
        known = fields.get("model_type") in CONFIG_MAPPING
        if "auto_map" in fields and not known and not config.trust_remote_code:
            raise foreign_code(key, config.path)
        if not known and "auto_map" not in fields:
            raise ModelError(
                f"{key}: {config.path!r} is of type {fields.get('model_type')!r}, unknown to transformers",
                remedy="use another model, or a release of transformers that has this type",
            )
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{key}: no model can be read from {config.path!r}: {error}",
            remedy="give a Hugging Face model folder, a run folder, a checkpoint, or a hub name that can be reached",
        ) from error
    return without_dropout(model_config)


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same config with each dropout and router noise at 0: log-probs must not depend on chance."""
    for name, value in config.to_dict().items():
        random = "dropout" in name or "jitter" in name or name.endswith(("pdrop", "layerdrop"))
        if random and isinstance(value, int | float) and not isinstance(value, bool) and value != 0:
            setattr(config, name, 0.0)
    return config


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that transformers has for this config as a causal language model; None if it has none."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found if isinstance(found, type) else None


def read_generation_config(config: ModelConfig, model_config: PreTrainedConfig) -> GenerationConfig:
    """The generation config beside the model, or the one that its config implies.

    Tandem takes the EOS ids from it and nothing else. Its sampling settings (temperature, top_k, top_p, repetition
    penalty) are ignored on purpose: they would bend the distribution that the policy is trained on.

    Raises:
        ModelError: The file is there, but broken.
    """
    path = resolve_model_path(str(config.path))
    if isinstance(path, Path) and not (path / "generation_config.json").exists():
        return GenerationConfig.from_model_config(model_config)
    try:
        return GenerationConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        if isinstance(path, str):  # on the hub, and there is none
            return GenerationConfig.from_model_config(model_config)
        raise ModelError(
            f"model.path: generation_config.json of {config.path!r} cannot be read: {error}",
            remedy="mend it, or remove it",
        ) from error


def load_model(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model at `model.path` with Tandem's attention, in evaluation mode.

    Only safetensors are read. Of the folder of an adapter it is the base with the adapter added. Call `check_model`
    first: it finds what is wrong without reading any weights.

    Args:
        config: Its `path`, `attention` and `trust_remote_code` are used.
        device: Where the weights go.
        dtype: Of the weights in memory, whatever they are saved in.

    Raises:
        ModelError: The folder lacks weights, or they do not fit the config.
    """
    folder = resolve_model_path(str(config.path))
    if is_adapter(folder):
        model = load_model(config.model_copy(update={"path": find_base(folder)}), device=device, dtype=dtype)
        add_deltas(_whole(dict(model.named_parameters())), read_deltas(folder))
        return model
    register()
    model_config = read_config(config)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model_config,
            dtype=dtype,
            attn_implementation=attention_name(config),
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _unloadable(config, error) from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers fills them with random numbers
        raise ModelError(
            f"model.path: {config.path!r} lacks {len(missing)} weights, such as {missing[0]}",
            remedy="the folder must hold all weights that its config.json asks for",
        )
    return model.to(device).eval()


def load_shards(config: ModelConfig, model: PreTrainedModel, shards: Mapping[str, Shard], *, names: FileNames) -> None:
    """Read this rank's part of the model at `model.path`, in place: its shards, and the buffers that files hold.

    Args:
        config: Its `path` is used.
        model: Materialised.
        shards: Of all parameters, by the model's names. Values are cast to their dtypes.
        names: Of the model's tensors in files.

    Raises:
        ModelError: The folder lacks weights, or they do not fit the config.
    """
    folder = resolve_model_path(str(config.path))
    source = find_base(folder) if is_adapter(folder) else str(config.path)
    try:
        read(weights_folder(source), {**_whole(saved_buffers(model)), **shards}, find=names.find)
    except (OSError, ValueError) as error:
        raise _unloadable(config, error) from error
    if is_adapter(folder):
        add_deltas(shards, read_deltas(folder))


def add_deltas(shards: Mapping[str, Shard], deltas: Mapping[str, Delta]) -> None:
    """Add to these shards of a model's weights what an adapter adds to them, in place."""
    for name, delta in deltas.items():
        delta.add_to_shard(shards[name])


def _unloadable(config: ModelConfig, error: Exception) -> ModelError:
    return ModelError(
        f"model.path: the weights of {config.path!r} cannot be loaded: {error}",
        remedy="the folder must hold all its safetensors files, unchanged since they were saved",
    )


def _whole(tensors: Mapping[str, Tensor], *, primary: bool = True) -> dict[str, Shard]:
    return {name: replace(Shard.whole(tensor), primary=primary) for name, tensor in tensors.items()}


def attention_name(config: ModelConfig) -> str:
    """The name under which transformers knows the attention function that `model.attention` chooses."""
    return NAMES["sdpa" if config.attention == "auto" else config.attention]


def save_model(
    model: PreTrainedModel,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    shards: Mapping[str, Shard] | None = None,
    names: FileNames | None = None,
    dtype: torch.dtype | None = None,
    lead: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, equal to the bit.

    It holds config, safetensors files, generation config, tokenizer and chat template. A tied tensor is written once.
    Whoever needs a folder that is complete or absent writes beside it and renames. With several ranks each calls this,
    with its own shards; the folder is complete when all have returned.

    Args:
        model: Gives the config, and the weights that `shards` does not give.
        folder: Made if missing.
        tokenizer: Saved along.
        shards: By name, as in `model.named_parameters()`; for masters kept outside of the model, and for several ranks.
        names: Of the model's tensors in files. None = found out, which needs a model that is not sharded.
        dtype: Of the saved weights. None = as they are.
        lead: This rank writes what there is only one of.
        max_file_bytes: A file grows to this size at most, or to that of its only tensor.

    Raises:
        ValueError: `shards` has a name that the model has not, or a tensor of another shape.
        OSError: The folder cannot be written.
    """
    every = _whole({**dict(model.named_parameters()), **saved_buffers(model)}, primary=lead)
    for name, shard in (shards or {}).items():
        if name not in every or every[name].shape != shard.shape:
            raise ValueError(f"{name} with shape {shard.shape} is no weight of {type(model).__name__}")
        every[name] = shard
    try:
        pieces = (names or FileNames(model)).written
    except ModelError:  # then there is one rank only, which has all that transformers needs to convert them
        pieces = None
    folder.mkdir(parents=True, exist_ok=True)
    with _write_errors():
        if pieces is not None:
            write(folder, every, pieces=pieces, dtype=dtype, lead=lead, max_file_bytes=max_file_bytes)
        else:
            tensors = {name: shard.tensor.detach() for name, shard in every.items()}
            state = {name: tensor.to(saved_dtype(tensor.dtype, dtype)) for name, tensor in tensors.items()}
            model.save_pretrained(folder, state_dict=state, max_shard_size=max_file_bytes)
        if lead:
            _save_config(model, folder, dtype)
            tokenizer.save_pretrained(folder)


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    shards: Mapping[str, Shard],
    lora: Lora,
    base: Base,
    lead: bool = True,
) -> None:
    """Write the adapters of a model as peft has them, float32, with all that a folder of `save_model` has but weights.

    With several ranks each calls this, with its own shards; the folder is complete when all have returned.

    Args:
        model: Gives the config.
        folder: Made if missing.
        tokenizer: Saved along.
        shards: Of the adapters, by the model's names.
        lora: That of the model.
        base: What it is without adapters.
        lead: This rank writes what there is only one of.

    Raises:
        OSError: The folder cannot be written.
    """
    with _write_errors():
        write_factors(folder, shards, lora.pieces, lead=lead)
        if lead:
            _save_config(model, folder, None)
            tokenizer.save_pretrained(folder)
            lora.save_config(folder, base.path)
            base.save(folder)


def _save_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None) -> None:
    """config.json, generation_config.json and the model's own code, as `save_pretrained` writes them."""
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = dtype or model.dtype
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)  # pyrefly: ignore[bad-argument-type]
    config.save_pretrained(folder)
    if model.can_generate():  # a value model cannot
        _make_saveable(model.generation_config)
        model.generation_config.save_pretrained(folder)


@contextmanager
def _write_errors() -> Generator[None]:
    """A full disk as OSError. safetensors and tokenizers report it by a class of their own and by bare Exception."""
    try:
        yield
    except Exception as error:
        if type(error) not in (SafetensorError, Exception):
            raise
        raise OSError(str(error)) from error


def _make_saveable(generation: GenerationConfig) -> None:
    """transformers refuses to save sampling settings beside `do_sample: false`, which many published models have."""
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True
