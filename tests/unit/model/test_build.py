"""Small models from the config alone."""

from __future__ import annotations

import random

import pytest
import torch

from tandem.errors import ModelError
from tandem.model.build import build_model, new_config
from tandem.model.tokenizer import character_tokenizer

CPU = torch.device("cpu")
TOKENIZER = character_tokenizer("0123456789+= ")
NEW = {
    "architecture": "Qwen3ForCausalLM",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_dropout": 0.1,
}


def test_the_config_takes_the_vocabulary_from_the_tokenizer() -> None:
    config = new_config(NEW, TOKENIZER)
    assert config.vocab_size == 16  # 15, rounded up to a multiple of 8
    assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (0, 1, None)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert (config.hidden_size, config.num_key_value_heads, config.attention_dropout) == (64, 2, 0)
    assert new_config({**NEW, "vocab_size": 40}, TOKENIZER).vocab_size == 40


def test_other_names_of_a_field_are_taken_too() -> None:
    assert new_config({**NEW, "rope_theta": 500.0}, TOKENIZER).rope_parameters["rope_theta"] == 500.0
    config = new_config({"architecture": "GPT2LMHeadModel", "hidden_size": 32, "n_head": 2}, TOKENIZER)
    assert (config.n_embd, config.num_attention_heads) == (32, 2)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("Qwen3ForCausalML", r"did you mean Qwen3ForCausalLM\?"),
        ("zzzz", "one of LlamaForCausalLM"),
        (None, r"architecture is missing"),
        (3, "'?3'? is no causal language model"),
    ],
)
def test_an_unknown_architecture_is_an_error(architecture: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        new_config({**NEW, "architecture": architecture}, TOKENIZER)


def test_all_unknown_fields_and_a_wrong_type_are_told_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        new_config({**NEW, "hiden_size": 64, "num_layer": 2, "hidden_size": "64"}, TOKENIZER)
    text = str(caught.value)
    assert text.startswith("3 problems")
    assert "model.new.hiden_size: Qwen3ForCausalLM has no such field\n    -> did you mean hidden_size?" in text
    assert "model.new.num_layer:" in text
    assert "'hidden_size' expected int, got str" in text


def test_the_seed_decides_the_weights_and_nothing_else_does() -> None:
    config = new_config(NEW, TOKENIZER)
    first = build_model(config, seed=0, device=CPU).state_dict()
    torch.rand(7)
    again = build_model(config, seed=0, device=CPU).state_dict()
    other = build_model(config, seed=1, device=CPU).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])


def test_global_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    before, python_before = torch.get_rng_state(), random.getstate()
    build_model(new_config(NEW, TOKENIZER), seed=0, device=CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python_before
    assert torch.get_default_dtype() == torch.float32


def test_it_has_tandems_attention_and_is_in_evaluation_mode() -> None:
    model = build_model(new_config(NEW, TOKENIZER), seed=0, device=CPU)
    assert model.config._attn_implementation == "tandem"
    assert not model.training
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
