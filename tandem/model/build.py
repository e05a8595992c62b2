"""Small models from the config alone, with random weights: `model.new`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.errors import ModelError
from tandem.model.attention import NAMES, register
from tandem.model.hf import without_dropout
from tandem.model.support import SUPPORTED, together
from tandem.model.tokenizer import tokenizer_size

_OLD_ROPE_FIELDS = frozenset({"rope_theta", "rope_scaling"})  # taken by every config that has rope_parameters
_VOCAB_MULTIPLE = 8


def new_config(new: Mapping[str, object], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The transformers config that `model.new` describes.

    `vocab_size` defaults to the tokenizer's, rounded up to a multiple of 8; the ids of pad, BOS and EOS are the
    tokenizer's. All other fields have the architecture's own defaults, which are often large.

    Raises:
        ModelError: The architecture or a field is unknown, or a value does not fit; all of it at once.
    """
    architecture = new.get("architecture")
    model_types = {name: kind for kind, name in reversed(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())}
    if not isinstance(architecture, str) or architecture not in model_types:
        raise _unknown_architecture(architecture, model_types)
    config_class = CONFIG_MAPPING[model_types[architecture]]
    fields = {name: value for name, value in new.items() if name != "architecture"}
    allowed = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    if "rope_parameters" in allowed:
        allowed |= _OLD_ROPE_FIELDS
    problems = [_unknown_field(name, architecture, allowed) for name in fields if name not in allowed]

    size = tokenizer_size(tokenizer)
    defaults: dict[str, Any] = {
        "vocab_size": -(-size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "architectures": [architecture],
    }
    given: dict[str, Any] = {**defaults, **{name: value for name, value in fields.items() if name in allowed}}
    try:
        config = config_class(**given)
    except (StrictDataclassError, ValueError, TypeError) as error:
        problems.append(ModelError(f"model.new: {architecture} refuses a field: {error}", remedy="correct the field"))
        raise together(problems) from error
    if problems:
        raise together(problems)
    return without_dropout(config)


def build_model(
    config: PreTrainedConfig, *, seed: int, attention: str = NAMES["sdpa"], device: torch.device
) -> PreTrainedModel:
    """A float32 model with random weights, by the architecture's own recipe, in evaluation mode.

    The same seed gives the same weights on every device. PyTorch's global random numbers are left as they were.

    Args:
        config: From `new_config`.
        seed: Of the weights.
        attention: Name of the attention function, `attention_name(config.model)`.
        device: Where the weights go. They are drawn on the CPU.
    """
    register()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # unlike torch.manual_seed, it leaves the GPUs' generators alone
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.to(device).eval()


def _unknown_architecture(architecture: object, model_types: Iterable[str]) -> ModelError:
    supported = f"one of {', '.join(SUPPORTED)}"
    if architecture is None:
        return ModelError("model.new.architecture is missing", remedy=supported)
    close = difflib.get_close_matches(str(architecture), [*SUPPORTED, *model_types], n=1)
    return ModelError(
        f"model.new.architecture: {architecture!r} is no causal language model of transformers",
        remedy=f"did you mean {close[0]}?" if close else supported,
    )


def _unknown_field(name: str, architecture: str, allowed: Iterable[str]) -> ModelError:
    close = difflib.get_close_matches(name, sorted(allowed), n=1)
    return ModelError(
        f"model.new.{name}: {architecture} has no such field",
        remedy=f"did you mean {close[0]}?" if close else "see this architecture's config in transformers",
    )
