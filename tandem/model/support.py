"""Which models Tandem can serve, and how it says that it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from tandem.errors import ModelError

SUPPORTED = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GPT2LMHeadModel",
)
"""Held to plain transformers by the tests. Others of the same make work as well: `reasons_against` decides."""

_SERVED_LAYERS = frozenset({"full_attention", "sliding_attention"})

# These add learned sinks to the softmax of attention, which Tandem's attention function does not have.
_WITH_SINKS = frozenset({"deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"})


def reasons_against(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> list[str]:
    """Why Tandem's attention function cannot serve this model; empty if it can.

    Such a model would not fail but compute something else in silence: the one attention function of Tandem
    replaces the model's masks, so whatever a model does beyond causal attention with a window would be lost.
    """
    reasons: list[str] = []
    if _field(config, "is_encoder_decoder") or _field(config, "add_cross_attention"):
        reasons.append("it is an encoder-decoder model")
    if _field(config, "is_decoder") is False or _field(config, "use_bidirectional_attention"):
        reasons.append("its attention is not causal")
    if config.get_text_config() is not config:
        reasons.append("it is a model of several modalities, and Tandem trains text-only models")
    layers = sorted(set(_field(config, "layer_types") or ()) - _SERVED_LAYERS)
    if layers:
        reasons.append(f"it has layers of type {', '.join(layers)}, and Tandem serves attention layers only")
    elif model_class._is_stateful:
        reasons.append("it has recurrent layers, and Tandem serves attention layers only")
    if not model_class._supports_attention_backend:
        reasons.append("its attention cannot be replaced (transformers marks it `_supports_attention_backend = False`)")
    if config.model_type in _WITH_SINKS:
        reasons.append("its attention has sinks, which Tandem's has not")
    if _field(config, "num_kv_shared_layers"):
        reasons.append("its layers share keys and values")
    return reasons


class Context(NamedTuple):
    """The longest sequence, prompt and response, that engine and trainer compute alike."""

    length: int | None  # None = the architecture states none
    note: str = ""  # for messages, after "N positions"


def context_of(config: PreTrainedConfig) -> Context:
    """The model's positions; with longrope, those before it stretches them.

    A pass with a longer sequence has other frequencies at all its positions, also of the other sequences in it: the
    engine, which goes on token by token, and the trainer, which runs the whole, would differ by more than a nat.
    """
    ropes: dict[str, Any] = _field(config, "rope_parameters") or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):  # one, or one per layer type
        if rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings"):
            return Context(int(rope["original_max_position_embeddings"]), " before its longrope stretches them")
    length = _field(config, "max_position_embeddings")  # also where its own name is another, as GPT-2's n_positions
    return Context(None if length is None else int(length))


def support_problems(config: PreTrainedConfig, model_class: type[PreTrainedModel], key: str) -> list[ModelError]:
    """What speaks against training this model, at the config key `key`: its architecture, or quantised weights."""
    problems: list[ModelError] = []
    reasons = reasons_against(config, model_class)
    if reasons:
        message = f"{key}: {model_class.__name__} cannot be served: {'; '.join(reasons)}"
        problems.append(ModelError(message, remedy=f"use an architecture such as {', '.join(SUPPORTED)}"))
    if _field(config, "quantization_config"):
        message = f"{key}: the weights are quantised, and training needs them as plain floating-point numbers"
        problems.append(ModelError(message, remedy="use the model's original in bfloat16, float16 or float32"))
    return problems


def fit_problems(
    config: PreTrainedConfig, key: str, path: str, *, vocab_size: int, max_sequence: int | None
) -> list[ModelError]:
    """What keeps a second model, such as a critic, from reading all that the policy may write.

    Args:
        config: The second model's.
        key: The config key that gives its `path`.
        path: See `key`.
        vocab_size: Rows of the policy's embedding. It can draw all these ids, also those that its tokenizer has not.
        max_sequence: Longest prompt and response together, in tokens; None = nothing is known of it.
    """
    problems: list[ModelError] = []
    if vocab_size > config.vocab_size:
        message = f"{key}: {path!r} knows {config.vocab_size} tokens, and the policy can draw {vocab_size}"
        problems.append(ModelError(message, remedy="use a model whose embedding has at least as many rows"))
    positions, note = context_of(config)
    if positions is not None and max_sequence is not None and max_sequence > positions:
        message = f"{key}: {path!r} has {positions} positions{note}, and sequences have up to {max_sequence}"
        problems.append(ModelError(message, remedy="lower data.max_prompt_length or rollout.max_response_length"))
    return problems


def together(problems: Sequence[ModelError]) -> ModelError:
    """One error that says all of them."""
    if len(problems) == 1:
        return problems[0]
    lines = "\n".join(f"- {problem}" for problem in problems).replace("\n", "\n  ")
    return ModelError(f"{len(problems)} problems with the model:\n  {lines}")


def _field(config: PreTrainedConfig, name: str) -> Any:
    """A field of the config; None where this architecture has none of that name."""
    return getattr(config, name, None)
