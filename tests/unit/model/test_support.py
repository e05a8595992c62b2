"""What Tandem serves and what it refuses, with the reason."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from tandem.errors import ModelError
from tandem.model.hf import model_class_of
from tandem.model.support import SUPPORTED, reasons_against, support_problems, together
from tests.tiny import ARCHITECTURES, UNSUITABLE


def _reasons(model_type: str, fields: dict[str, object]) -> list[str]:
    config = AutoConfig.for_model(model_type, **fields)
    model_class = model_class_of(config)
    assert model_class is not None
    return reasons_against(config, model_class)


def test_the_list_is_what_the_tiny_models_cover() -> None:
    assert set(SUPPORTED) == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_supported_architectures_are_served(architecture: str) -> None:
    assert _reasons(*ARCHITECTURES[architecture]) == []


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("Qwen3NextForCausalLM", "layers of type linear_attention"),
        ("MambaForCausalLM", "layers of type linear_attention"),
        ("BloomForCausalLM", "attention cannot be replaced"),
        ("Lfm2ForCausalLM", "layers of type conv"),
    ],
)
def test_unsuitable_architectures_are_refused(architecture: str, reason: str) -> None:
    assert reason in "; ".join(_reasons(*UNSUITABLE[architecture]))


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("gpt_oss", {}, "sinks"),
        ("recurrent_gemma", {}, "attention layers only"),
        ("gpt2", {"add_cross_attention": True}, "encoder-decoder"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "not causal"),
        ("bert", {}, "not causal"),
        ("gemma3", {}, "several modalities"),
        ("llama4_text", {}, "chunked_attention"),
    ],
)
def test_what_goes_beyond_causal_attention_with_a_window_is_refused(
    model_type: str, fields: dict[str, object], reason: str
) -> None:
    assert reason in "; ".join(_reasons(model_type, fields))


def test_the_refusal_says_what_to_use_instead() -> None:
    config = AutoConfig.for_model("bloom", quantization_config={"quant_method": "awq"})
    model_class = model_class_of(config)
    assert model_class is not None
    architecture, quantised = support_problems(config, model_class, "model.path")
    assert "model.path: BloomForCausalLM cannot be served" in str(architecture)
    assert "Qwen3ForCausalLM" in str(architecture.remedy)
    assert "quantised" in str(quantised)


def test_one_error_says_all_problems() -> None:
    single = ModelError("first", remedy="do this")
    assert together([single]) is single
    both = str(together([single, ModelError("second")]))
    assert both == "2 problems with the model:\n  - first\n    -> do this\n  - second"
