"""Models of transformers: read the config, load the weights, save a folder that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
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

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.model.attention import NAMES, register
from tandem.model.source import check_hub_name, foreign_code, resolve_model_path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # that a config can name
MAX_SHARD_BYTES = 5 * 10**9


def read_config(config: ModelConfig) -> PreTrainedConfig:
    """The config of the model at `model.path`, with all randomness of training (dropout, router noise) set to 0.

    Raises:
        ModelError: It cannot be read, is unknown to transformers, or needs code that is shipped with the model.
    """
    if config.path is None:
        raise ModelError("no model is given", remedy="set model.path or model.new")
    path = resolve_model_path(config.path)
    if isinstance(path, str):
        check_hub_name(path)
    try:
        fields, _ = PreTrainedConfig.get_config_dict(path)
        known = fields.get("model_type") in CONFIG_MAPPING
        if "auto_map" in fields and not known and not config.trust_remote_code:
            raise foreign_code("model.path", config.path)
        if not known and "auto_map" not in fields:
            raise ModelError(
                f"model.path: {config.path!r} is of type {fields.get('model_type')!r}, unknown to transformers",
                remedy="use another model, or a release of transformers that has this type",
            )
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path: no model can be read from {config.path!r}: {error}",
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

    Only safetensors are read. Call `check_model` first: it finds what is wrong without reading any weights.

    Args:
        config: Its `path`, `attention` and `trust_remote_code` are used.
        device: Where the weights go.
        dtype: Of the weights in memory, whatever they are saved in.

    Raises:
        ModelError: The folder lacks weights, or they do not fit the config.
    """
    register()
    model_config = read_config(config)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            resolve_model_path(str(config.path)),
            config=model_config,
            dtype=dtype,
            attn_implementation=attention_name(config),
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"model.path: the weights of {config.path!r} cannot be loaded: {error}",
            remedy="the folder must hold all its safetensors files, unchanged since they were saved",
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers fills them with random numbers
        raise ModelError(
            f"model.path: {config.path!r} lacks {len(missing)} weights, such as {missing[0]}",
            remedy="the folder must hold all weights that its config.json asks for",
        )
    return model.to(device).eval()


def attention_name(config: ModelConfig) -> str:
    """The name under which transformers knows the attention function that `model.attention` chooses."""
    return NAMES["sdpa" if config.attention == "auto" else config.attention]


def save_model(
    model: PreTrainedModel,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, equal to the bit.

    It holds config, safetensors (in shards), generation config, tokenizer and chat template. A tied tensor is
    written once. Whoever needs a folder that is complete or absent writes beside it and renames.

    Args:
        model: Gives the config, the names, and the weights that `weights` does not give.
        folder: Made if missing.
        tokenizer: Saved along.
        weights: By name, as in `model.named_parameters()`; for masters kept outside of the model.
        dtype: Of the saved weights. None = as they are.
        max_shard_bytes: A file grows to this size at most, or to that of its only tensor.

    Raises:
        ValueError: `weights` has a name that the model has not, or a tensor of another shape.
        OSError: The folder cannot be written.
    """
    state = _own_state(model)
    for name, tensor in (weights or {}).items():
        if name not in state or state[name].shape != tensor.shape:
            raise ValueError(f"{name} with shape {tuple(tensor.shape)} is no weight of {type(model).__name__}")
        state[name] = tensor
    state = {name: _cast(tensor.detach(), dtype) for name, tensor in state.items()}
    _make_saveable(model.generation_config)
    folder.mkdir(parents=True, exist_ok=True)
    with _write_errors():
        model.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_bytes)
        tokenizer.save_pretrained(folder)
    if dtype is not None:
        file = folder / "config.json"
        fields = json.loads(file.read_text(encoding="utf-8"))
        fields["dtype"] = str(dtype).removeprefix("torch.")
        file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _write_errors() -> Generator[None]:
    """A full disk as OSError. safetensors and tokenizers report it by a class of their own and by bare Exception."""
    try:
        yield
    except Exception as error:
        if type(error) not in (SafetensorError, Exception):
            raise
        raise OSError(str(error)) from error


def _own_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights and saved buffers, each tied tensor under its first name only."""
    parameters = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - parameters.keys()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _make_saveable(generation: GenerationConfig) -> None:
    """transformers refuses to save sampling settings beside `do_sample: false`, which many published models have."""
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True
