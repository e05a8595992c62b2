"""Tokenizers: one token per character, exact text back, every EOS id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tandem.config.model import CharacterTokenizer, ModelConfig
from tandem.errors import ModelError
from tandem.model.tokenizer import character_tokenizer, eos_ids, load_tokenizer, tokenizer_size
from tests.tiny import tiny_model_folder, tiny_tokenizer

ADDITION = "0123456789+= "


def test_one_token_for_each_character_in_the_order_of_the_list() -> None:
    tokenizer = character_tokenizer(ADDITION)
    assert tokenizer.encode("07+45=") == [2, 9, 12, 6, 7, 13]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer_size(tokenizer) == len(ADDITION) + 2


@pytest.mark.parametrize("text", ["07+45=", "1 + 2  = 3", " ", "=="])
def test_decoding_gives_the_exact_text(text: str, tmp_path: Path) -> None:
    tokenizer = character_tokenizer(ADDITION)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert each.decode(each.encode(text)) == text


def test_newline_and_accents_are_characters_too() -> None:
    tokenizer = character_tokenizer("a\né?")
    assert tokenizer.decode(tokenizer.encode("é\na?\n")) == "é\na?\n"


def test_special_tokens_and_ids_without_a_meaning_decode_to_nothing() -> None:
    tokenizer = character_tokenizer(ADDITION)
    assert tokenizer.decode([2, 3, 1, 15, 4], skip_special_tokens=True) == "012"


def test_an_unknown_character_is_never_replaced_in_silence() -> None:
    tokenizer = character_tokenizer(ADDITION)
    with pytest.raises(Exception, match="UNK"):  # the tokenizers library raises a plain Exception
        tokenizer.encode("two")


def test_a_bad_character_list_is_refused() -> None:
    with pytest.raises(ModelError, match="'1', 'a' more than once"):
        character_tokenizer("a1ba1")
    with pytest.raises(ModelError, match="is empty"):
        character_tokenizer("")


def test_the_config_builds_one_or_names_one_or_takes_the_models(tmp_path: Path) -> None:
    folder = str(tiny_model_folder(tmp_path / "model"))
    other = tmp_path / "other"
    tiny_tokenizer(characters="xyz").save_pretrained(other)
    (other / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    built = ModelConfig(path=folder, tokenizer=CharacterTokenizer(characters=ADDITION))
    assert tokenizer_size(load_tokenizer(built)) == len(ADDITION) + 2
    assert tokenizer_size(load_tokenizer(ModelConfig(path=folder, tokenizer=str(other)))) == 5
    assert tokenizer_size(load_tokenizer(ModelConfig(path=folder))) == 98


def test_a_character_tokenizer_survives_beside_any_architecture(tmp_path: Path) -> None:
    # AutoTokenizer would rebuild it as Qwen2's own kind and lose the spaces.
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model_folder(tmp_path, "Qwen2ForCausalLM"))))
    assert tokenizer.decode(tokenizer.encode("What is 3 + 4?")) == "What is 3 + 4?"
    assert tokenizer.chat_template is not None


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_a_missing_tokenizer_is_an_error_with_a_remedy(architecture: str, tmp_path: Path) -> None:
    tiny_model_folder(tmp_path, architecture)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"(?s)no tokenizer can be read.*\n  -> .*tokenizer\.json"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_a_new_model_needs_a_tokenizer() -> None:
    with pytest.raises(ModelError, match=r"model\.new needs a tokenizer"):
        load_tokenizer(ModelConfig(new={"architecture": "Qwen3ForCausalLM"}))


def test_code_of_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    fields |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    file.write_text(json.dumps(fields))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    load_tokenizer(ModelConfig(path=str(tmp_path)))  # transformers has a class for this architecture
    assert not (tmp_path / "ran").exists()


def test_fault_15_all_eos_ids_of_generation_config_and_tokenizer_end_a_response() -> None:
    tokenizer = character_tokenizer(ADDITION)
    assert eos_ids(GenerationConfig(eos_token_id=[7, 5]), tokenizer) == (1, 5, 7)
    assert eos_ids(GenerationConfig(eos_token_id=7), tokenizer) == (1, 7)
    assert eos_ids(GenerationConfig(), tokenizer) == (1,)


def test_fault_16_pad_equal_to_eos_is_an_eos() -> None:
    tokenizer = character_tokenizer(ADDITION)
    tokenizer.pad_token = tokenizer.eos_token
    assert eos_ids(GenerationConfig(eos_token_id=1, pad_token_id=1), tokenizer) == (1,)
