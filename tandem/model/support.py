"""Which models Tandem can serve, and how it says that it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def together(problems: Sequence[ModelError]) -> ModelError:
    """One error that says all of them."""
    if len(problems) == 1:
        return problems[0]
    lines = "\n".join(f"- {problem}" for problem in problems).replace("\n", "\n  ")
    return ModelError(f"{len(problems)} problems with the model:\n  {lines}")


def _field(config: PreTrainedConfig, name: str) -> Any:
    """A field of the config; None where this architecture has none of that name."""
    return getattr(config, name, None)
