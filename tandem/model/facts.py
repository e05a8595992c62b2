"""What is known of a model before its weights are read, and everything that speaks against it, at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.model.adapter_files import find_base, is_adapter
from tandem.model.build import new_config
from tandem.model.hf import model_class_of, read_config, read_generation_config
from tandem.model.lora import lora_problems, num_adapter_parameters
from tandem.model.source import resolve_model_path, weights_problems
from tandem.model.support import Context, context_of, fit_problems, support_problems, together
from tandem.model.tokenizer import eos_ids, load_tokenizer, tokenizer_size

_Made = TypeVar("_Made")
_REFERENCE = "algorithm.reference"


@dataclass(frozen=True)
class ModelFacts:
    """What a run needs to know of its model beforehand."""

    architecture: str
    num_parameters: int  # a tied tensor counts once
    num_adapter_parameters: int  # of these none: what is trained with `model.lora_rank`; 0 = all weights are
    context: Context
    eos_ids: tuple[int, ...]
    dtype: torch.dtype  # that the weights are saved in; float32 for a new model


def check_model(config: ModelConfig) -> ModelFacts:
    """Read config and tokenizer, no weights, and report all problems in one error.

    An embedding with more rows than the tokenizer has tokens is fine: many models pad it. Such ids can be drawn in
    principle, and decode to nothing. They are not masked out, because the policy's distribution would then no
    longer be that of plain transformers and of other engines, whose log-probs must agree with the trainer's.

    Raises:
        ModelError: The model cannot be trained, with everything that speaks against it.
    """
    problems: list[ModelError] = []
    tokenizer: Tokenizer | None
    if config.new is not None:
        tokenizer = load_tokenizer(config)
        model_config = new_config(config.new, tokenizer)
    else:
        read = _tried(lambda: read_config(config), problems)
        if read is None and config.tokenizer is None:  # the tokenizer would come from the same place
            raise together(problems)
        tokenizer = _tried(lambda: load_tokenizer(config), problems)
        if read is None:
            raise together(problems)
        model_config = read
    generation = _generation_config(config, model_config)
    model_class = _model_class(config, model_config, problems, "model.path")
    if model_class is not None:
        problems += support_problems(model_config, model_class, "model.path" if config.new is None else "model.new")
    if config.path is not None:
        problems += _weights_problems(resolve_model_path(config.path), "model.path")
    if config.lora_rank > 0 and not problems:
        problems += lora_problems(config, _skeleton(config, model_config))
    if tokenizer is not None:
        problems += _vocabulary_problems(model_config, tokenizer)
        problems += _eos_problems(model_config, generation, tokenizer)
    if problems or tokenizer is None:
        raise together(problems)
    return _facts(config, model_config, generation, tokenizer)


def plain_config(config: ModelConfig) -> PreTrainedConfig:
    """The transformers config of the model that is at `model.path`, or that `model.new` describes.

    Raises:
        ModelError: It cannot be read.
    """
    return read_config(config) if config.new is None else new_config(config.new, load_tokenizer(config))


def check_reference_model(source: ModelConfig, *, vocab_size: int, max_sequence: int | None) -> None:
    """Read the config of a reference, no weights, and report everything that speaks against it.

    Args:
        source: Its `path` is that of the reference.
        vocab_size, max_sequence: See `fit_problems`.

    Raises:
        ModelError: It cannot be used.
    """
    config, problems = read_config(source, key=_REFERENCE), list[ModelError]()
    model_class = _model_class(source, config, problems, _REFERENCE)
    if model_class is not None:
        problems += support_problems(config, model_class, _REFERENCE)
    problems += _weights_problems(resolve_model_path(str(source.path), key=_REFERENCE), _REFERENCE)
    problems += fit_problems(config, _REFERENCE, str(source.path), vocab_size=vocab_size, max_sequence=max_sequence)
    if problems:
        raise together(problems)


def _tried(make: Callable[[], _Made], problems: list[ModelError]) -> _Made | None:
    """What `make` returns; None, with the problem noted, where it refuses."""
    try:
        return make()
    except ModelError as error:
        problems.append(error)
        return None


def _weights_problems(folder: Path | str, key: str) -> list[ModelError]:
    if isinstance(folder, str) or not is_adapter(folder):
        return weights_problems(folder, key=key)
    problems: list[ModelError] = []
    _tried(lambda: find_base(folder), problems)
    return problems


def _model_class(
    config: ModelConfig, model_config: PreTrainedConfig, problems: list[ModelError], key: str
) -> type[PreTrainedModel] | None:
    """The model's class; None, with a problem added, where it is no causal language model."""
    model_class = model_class_of(model_config)
    if model_class is None and config.trust_remote_code:
        return type(_skeleton(config, model_config))
    if model_class is None:
        name = type(model_config).__name__
        problems.append(
            ModelError(
                f"{key}: {config.path!r} is no causal language model: transformers has none for its {name}",
                remedy="give a text-only, decoder-only language model",
            )
        )
    return model_class


def _skeleton(config: ModelConfig, model_config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            model_config, attn_implementation="eager", trust_remote_code=config.trust_remote_code
        )


def _generation_config(config: ModelConfig, model_config: PreTrainedConfig) -> GenerationConfig:
    if config.new is not None:
        return GenerationConfig.from_model_config(model_config)
    return read_generation_config(config, model_config)


def _vocabulary_problems(model_config: PreTrainedConfig, tokenizer: Tokenizer) -> list[ModelError]:
    size, rows = tokenizer_size(tokenizer), model_config.vocab_size
    if size <= rows:
        return []
    return [
        ModelError(
            f"the tokenizer has {size} tokens, but the model's embedding only {rows} rows",
            remedy="use the tokenizer that belongs to the model (model.tokenizer), or a model with a larger embedding",
        )
    ]


def _eos_problems(
    model_config: PreTrainedConfig, generation: GenerationConfig, tokenizer: Tokenizer
) -> list[ModelError]:
    if any(token < model_config.vocab_size for token in eos_ids(generation, tokenizer)):
        return []
    return [
        ModelError(
            "neither the tokenizer nor the generation config has an EOS token: no response could end by itself",
            remedy="set eos_token_id in the model's generation_config.json, or eos_token in its tokenizer_config.json",
        )
    ]


def _facts(
    config: ModelConfig, model_config: PreTrainedConfig, generation: GenerationConfig, tokenizer: Tokenizer
) -> ModelFacts:
    model = _skeleton(config, model_config)
    return ModelFacts(
        architecture=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_adapter_parameters=num_adapter_parameters(config, model),
        context=context_of(model_config),
        eos_ids=eos_ids(generation, tokenizer),
        dtype=model_config.dtype if isinstance(model_config.dtype, torch.dtype) else torch.float32,
    )
