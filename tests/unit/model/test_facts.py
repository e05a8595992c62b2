"""What is found out about a model before its weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.model import CharacterTokenizer, ModelConfig
from tandem.errors import ModelError
from tandem.model.facts import check_model
from tests.tiny import ARCHITECTURES, UNSUITABLE, tiny_model_folder


def _edit(file: Path, changes: dict[str, Any]) -> None:
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in {**fields, **changes}.items() if value != "REMOVE"}))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tie", [True, False])
def test_facts_agree_with_the_weights(architecture: str, tie: bool, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, architecture, tie=tie)
    facts = check_model(ModelConfig(path=str(folder)))
    saved = load_file(folder / "model.safetensors")
    assert facts.architecture == architecture
    assert facts.num_parameters == sum(tensor.numel() for tensor in saved.values())
    assert facts.context.length == 512


@pytest.mark.parametrize("architecture", UNSUITABLE)
def test_an_unsuitable_architecture_is_refused_before_its_weights_are_read(architecture: str, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, architecture)
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ModelError, match=rf"{architecture} cannot be served.*\n  -> use an architecture such as Llama"):
        check_model(ModelConfig(path=str(folder)))


def test_fault_15_two_eos_ids(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, eos_token_ids=[9, 5])
    assert check_model(ModelConfig(path=str(folder))).eos_ids == (1, 5, 9)


def test_the_dtype_is_that_of_the_saved_weights(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, dtype=torch.bfloat16)
    assert check_model(ModelConfig(path=str(folder))).dtype == torch.bfloat16


def test_a_new_model_has_facts_too() -> None:
    new = {"architecture": "Qwen3ForCausalLM", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    new |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    facts = check_model(ModelConfig(new=new, tokenizer=CharacterTokenizer(characters="0123456789+= ")))
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    vocabulary = 16  # 15 tokens, rounded up
    assert facts.num_parameters == 2 * layer + 2 * vocabulary * 64 + 64
    assert (facts.eos_ids, facts.dtype) == ((1,), torch.float32)


def test_no_eos_token_anywhere(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    _edit(folder / "tokenizer_config.json", {"eos_token": "REMOVE"})
    _edit(folder / "generation_config.json", {"eos_token_id": "REMOVE"})
    with pytest.raises(ModelError, match=r"has an EOS token.*\n  -> set eos_token_id"):
        check_model(ModelConfig(path=str(folder)))


def test_a_generation_config_may_be_missing_but_not_broken(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, overrides={"eos_token_id": 9})
    (folder / "generation_config.json").unlink()
    assert check_model(ModelConfig(path=str(folder))).eos_ids == (1, 9)
    (folder / "generation_config.json").write_text("{broken")
    with pytest.raises(ModelError, match=r"generation_config\.json .* cannot be read"):
        check_model(ModelConfig(path=str(folder)))


def test_no_pad_token_is_no_problem(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    _edit(folder / "tokenizer_config.json", {"pad_token": "REMOVE"})
    _edit(folder / "config.json", {"pad_token_id": "REMOVE"})
    assert check_model(ModelConfig(path=str(folder))).eos_ids == (1,)


def test_a_tokenizer_larger_than_the_embedding_names_both_sizes(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, vocab_size=96)
    with pytest.raises(ModelError, match=r"the tokenizer has 98 tokens, but the model's embedding only 96 rows"):
        check_model(ModelConfig(path=str(folder)))


def test_all_problems_at_once(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "BloomForCausalLM", vocab_size=96)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    _edit(folder / "config.json", {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(ModelError) as caught:
        check_model(ModelConfig(path=str(folder)))
    text = str(caught.value)
    assert text.startswith("4 problems")
    for part in ("BloomForCausalLM cannot be served", "quantised", "pickle only", "98 tokens"):
        assert part in text


def test_a_missing_tokenizer_does_not_hide_other_problems(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "BloomForCausalLM")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"(?s)no tokenizer.*BloomForCausalLM cannot be served"):
        check_model(ModelConfig(path=str(folder)))


def test_no_model_at_all() -> None:
    with pytest.raises(ModelError, match=r"set model\.path or model\.new"):
        check_model(ModelConfig())


def test_a_broken_or_unknown_config_is_an_error(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    _edit(folder / "config.json", {"model_type": "no_such_type"})
    with pytest.raises(ModelError, match="type 'no_such_type', unknown to transformers"):
        check_model(ModelConfig(path=str(folder)))
    (folder / "config.json").write_text("{broken")
    with pytest.raises(ModelError, match=r"model\.path: no model can be read"):
        check_model(ModelConfig(path=str(folder)))


def _with_own_code(folder: Path) -> Path:
    """A model folder with a class of its own; running that code leaves the file `ran`."""
    tiny_model_folder(folder)
    names = {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"}
    _edit(folder / "config.json", {"model_type": "own_model_type", "auto_map": names})
    (folder / "own_model.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        f"open({str(folder / 'ran')!r}, 'w').close()\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own_model_type'\n"
        "class OwnModel(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    )
    return folder


def test_code_shipped_with_a_model_is_not_run(tmp_path: Path) -> None:
    folder = _with_own_code(tmp_path)
    with pytest.raises(ModelError, match=r"is not run\n  -> .*model\.trust_remote_code=true"):
        check_model(ModelConfig(path=str(folder)))
    assert not (folder / "ran").exists()


def test_code_shipped_with_a_model_is_run_on_request(tmp_path: Path) -> None:
    folder = _with_own_code(tmp_path)
    assert check_model(ModelConfig(path=str(folder), trust_remote_code=True)).architecture == "OwnModel"
    assert (folder / "ran").exists()
