"""Loading and saving models of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.model.hf import load_model, read_config, save_model
from tandem.model.shards import Shard
from tandem.model.tokenizer import load_tokenizer
from tests.tiny import ARCHITECTURES, CHAT_TEMPLATE, tiny_model_folder

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 17, 2, 60, 33]])


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_model(ModelConfig(path=str(folder)), device=CPU, dtype=dtype)


def _plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def _same_weights(left: PreTrainedModel, right: PreTrainedModel) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _saved_names(folder: Path) -> list[str]:
    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            names += handle.keys()
    return sorted(names)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tie", [True, False])
def test_fault_26_a_saved_model_loads_in_transformers_equal_to_the_bit(
    architecture: str, tie: bool, tmp_path: Path
) -> None:
    source = tiny_model_folder(tmp_path / "source", architecture, tie=tie)
    model = _load(source)
    save_model(model, tmp_path / "saved", tokenizer=load_tokenizer(ModelConfig(path=str(source))))
    again = _plain(tmp_path / "saved")
    assert type(again).__name__ == architecture
    assert _same_weights(again, _plain(source))
    assert torch.equal(again(IDS).logits, _plain(source)(IDS).logits)
    assert _saved_names(tmp_path / "saved") == _saved_names(source)
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) is tie


def test_tokenizer_template_and_generation_config_come_along(tmp_path: Path) -> None:
    source = tiny_model_folder(tmp_path / "source", eos_token_ids=[1, 7])
    save_model(_load(source), tmp_path / "saved", tokenizer=load_tokenizer(ModelConfig(path=str(source))))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.decode(tokenizer.encode("3 + 4 =")) == "3 + 4 ="
    assert _plain(tmp_path / "saved").generation_config.eos_token_id == [1, 7]
    assert "tandem" not in (tmp_path / "saved" / "config.json").read_text()


def test_weights_from_outside_of_the_model_are_saved_in_the_asked_dtype(tmp_path: Path) -> None:
    source = tiny_model_folder(tmp_path / "source", dtype=torch.bfloat16)
    model = _load(source)
    masters = {name: parameter.detach() * 1.01 for name, parameter in model.named_parameters()}
    shards = {name: Shard.whole(master) for name, master in masters.items()}
    tokenizer = load_tokenizer(ModelConfig(path=str(source)))
    save_model(model, tmp_path / "saved", tokenizer=tokenizer, shards=shards, dtype=torch.bfloat16)
    again = _plain(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, masters[name].to(torch.bfloat16))


def test_foreign_weights_are_refused(tmp_path: Path) -> None:
    model = _load(tiny_model_folder(tmp_path / "source"))
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path / "source")))
    for name, tensor in {"no.such": torch.zeros(1), "model.norm.weight": torch.zeros(3)}.items():
        with pytest.raises(ValueError, match=f"{name} with shape"):
            save_model(model, tmp_path / "saved", tokenizer=tokenizer, shards={name: Shard.whole(tensor)})
    assert not (tmp_path / "saved").exists()


def test_large_models_are_saved_in_shards(tmp_path: Path) -> None:
    source = tiny_model_folder(tmp_path / "source")
    tokenizer = load_tokenizer(ModelConfig(path=str(source)))
    save_model(_load(source), tmp_path / "saved", tokenizer=tokenizer, max_file_bytes=100_000)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert _same_weights(_plain(tmp_path / "saved"), _plain(source))


def test_published_sampling_settings_do_not_stop_a_save(tmp_path: Path) -> None:
    source = tiny_model_folder(tmp_path / "source")
    file = source / "generation_config.json"
    settings = {"do_sample": False, "temperature": 0.6, "top_k": 20}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    save_model(_load(source), tmp_path / "saved", tokenizer=load_tokenizer(ModelConfig(path=str(source))))
    assert _plain(tmp_path / "saved").generation_config.temperature == 0.6


def test_weights_are_loaded_in_the_asked_dtype(tmp_path: Path) -> None:
    source = tiny_model_folder(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in _load(source).parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in _load(source, torch.bfloat16).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("attention", "name"), [("auto", "tandem"), ("sdpa", "tandem"), ("eager", "tandem_eager")])
def test_the_model_runs_tandems_attention(attention: str, name: str, tmp_path: Path) -> None:
    config = ModelConfig.model_validate({"path": str(tiny_model_folder(tmp_path)), "attention": attention})
    model = load_model(config, device=CPU, dtype=torch.float32)
    assert model.config._attn_implementation == name
    with pytest.raises(ModelError, match="without `spans`"):
        model(IDS)


def test_all_dropout_is_off_in_training_too(tmp_path: Path) -> None:
    dropout = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    folder = tiny_model_folder(tmp_path, "GPT2LMHeadModel", overrides=dropout)
    config = read_config(ModelConfig(path=str(folder)))
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0, 0, 0)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config).train()
    assert torch.equal(model(IDS).logits, model(IDS).logits)


def test_router_noise_is_off(tmp_path: Path) -> None:
    fields = {
        "model_type": "mixtral",
        "router_jitter_noise": 0.1,
        "attention_dropout": 0.2,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(ModelConfig(path=str(tmp_path)))
    assert (config.router_jitter_noise, config.attention_dropout, config.tie_word_embeddings) == (0, 0, True)


def test_a_missing_weight_is_never_made_up(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        _load(folder)


def test_weights_that_do_not_fit_or_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "vocab_size": 200}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        _load(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").write_bytes(b"torn in two")
    with pytest.raises(ModelError, match="cannot be loaded"):
        _load(folder)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        _load(folder)
