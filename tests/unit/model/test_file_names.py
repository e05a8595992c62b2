"""Folders that transformers wrote, read in shards, and folders written in shards: the same as transformers' own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.model.file_names import FileNames, saved_buffers
from tandem.model.hf import load_model, load_shards, save_model
from tandem.model.skeleton import materialise, skeleton
from tests.cut import cut, empty
from tests.tiny import ARCHITECTURES, tiny_model, tiny_tokenizer

LAYERS = {"vocab_size": 104, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "pad_token_id": 0} | {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MIXTURES = {
    # Experts as w1, w2 and w3, and another name for the layer that has them.
    "mixtral": LAYERS | {"num_local_experts": 3},
    # Files with a buffer; the first layer has no experts.
    "deepseek_v3": LAYERS
    | {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    | {"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
}


def mixture(model_type: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **MIXTURES[model_type]))
    for buffer in saved_buffers(model).values():
        buffer.copy_(torch.linspace(0, 1, len(buffer)))
    return model


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {**{name: each.detach() for name, each in model.named_parameters()}, **saved_buffers(model)}


def read_by_ranks(folder: Path, size: int) -> dict[str, Tensor]:
    """What ranks read into float32 shards, put together."""
    model = skeleton(AutoConfig.from_pretrained(folder))
    names = FileNames(model)
    materialise(model, torch.device("cpu"))
    ranks = [empty(shards) for shards in cut(dict(model.named_parameters()), size)]
    for shards in ranks:
        load_shards(ModelConfig(path=str(folder)), model, shards, names=names)
    whole = {name: torch.cat([shards[name].tensor for shards in ranks]) for name in ranks[0]}
    return {**whole, **saved_buffers(model)}


def write_by_ranks(model: PreTrainedModel, folder: Path, size: int, *, max_file_bytes: int = 10**9) -> None:
    """The weights come from the shards alone: the model has none."""
    bare = skeleton(model.config)
    names = FileNames(bare)
    for name, buffer in saved_buffers(model).items():
        module, _, own = name.rpartition(".")
        bare.get_submodule(module).register_buffer(own, buffer)
    for rank, shards in enumerate(cut(dict(model.named_parameters()), size)):
        save_model(
            bare,
            folder,
            tokenizer=tiny_tokenizer(),
            shards=shards,
            names=names,
            dtype=model.dtype,
            lead=rank == 0,
            max_file_bytes=max_file_bytes,
        )


def saved_in(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


CASES: dict[str, Callable[[], PreTrainedModel]] = {
    **{f"{name}-tied": lambda name=name: tiny_model(name) for name in ARCHITECTURES},
    **{f"{name}-untied": lambda name=name: tiny_model(name, tie=False) for name in ARCHITECTURES},
    **{name: lambda name=name: mixture(name) for name in MIXTURES},
}


@pytest.mark.parametrize("case", CASES)
def test_shards_are_read_as_from_pretrained_reads(case: str, tmp_path: Path) -> None:
    model = CASES[case]()
    model.save_pretrained(tmp_path / "one")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "several", max_shard_size=10_000)
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    for folder in (tmp_path / "one", tmp_path / "several"):
        expected = weights_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        assert all(each.abs().sum() > 0 for each in expected.values())
        for size in (1, 2, 3):
            assert equal(read_by_ranks(folder, size), expected)


@pytest.mark.parametrize("case", CASES)
def test_shards_are_written_as_save_pretrained_writes(case: str, tmp_path: Path) -> None:
    model = CASES[case]().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    for size, max_file_bytes in ((1, 10**9), (2, 10**9), (3, 10_000)):
        ours = tmp_path / f"ours-{size}"
        write_by_ranks(model, ours, size, max_file_bytes=max_file_bytes)
        assert equal(saved_in(ours), saved_in(tmp_path / "theirs"))
        for name in ("config.json", "generation_config.json"):
            assert json.loads((ours / name).read_text()) == json.loads((tmp_path / "theirs" / name).read_text())
        again = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32)
        assert type(again) is type(model)
        assert equal(weights_of(again), {name: each.float() for name, each in weights_of(model).items()})
    assert len(list(ours.glob("*.safetensors"))) > 1


def test_experts_in_one_tensor_in_the_files_too(tmp_path: Path) -> None:
    model = tiny_model("Qwen3MoeForCausalLM")
    model.save_pretrained(tmp_path, save_original_format=False)
    assert saved_in(tmp_path)["model.layers.0.mlp.experts.gate_up_proj"].ndim == 3
    assert equal(read_by_ranks(tmp_path, 2), weights_of(model))


def rewrite(folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Each tensor of the only file replaced by some."""
    file = folder / "model.safetensors"
    changed = {name: each for old, tensor in load_file(file).items() for name, each in change(old, tensor).items()}
    save_file(changed, file, metadata={"format": "pt"})


def test_an_old_folder_lacks_the_prefix_and_has_masks_that_no_model_wants(tmp_path: Path) -> None:
    model = tiny_model("GPT2LMHeadModel")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda name, tensor: {name.removeprefix("transformer."): tensor, "h.0.attn.bias": torch.ones(4)})
    assert equal(read_by_ranks(tmp_path, 2), weights_of(model))


@pytest.mark.parametrize("names", [["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"]])
def test_fault_26_a_tied_tensor_is_found_under_either_name_and_read_once(tmp_path: Path, names: list[str]) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    embeddings = "model.embed_tokens.weight"
    rewrite(tmp_path, lambda name, tensor: {each: tensor.clone() for each in (names if name == embeddings else [name])})
    assert equal(read_by_ranks(tmp_path, 2), weights_of(model))


def test_all_that_a_folder_lacks_is_told(tmp_path: Path) -> None:
    model = tiny_model("Qwen3MoeForCausalLM")
    model.save_pretrained(tmp_path)
    lost = ("model.norm.weight", "model.layers.0.mlp.experts.2.up_proj.weight")
    rewrite(tmp_path, lambda name, tensor: {} if name in lost else {name: tensor})
    message = r"^model\.path: the weights of .* cannot be loaded: .*gate_up_proj has 14336 of its 16384 elements"
    for size in (1, 2):
        with pytest.raises(ModelError, match=message + r"; model\.norm\.weight is missing\n  -> the folder must hold"):
            read_by_ranks(tmp_path, size)


def test_an_architecture_whose_files_are_no_ranges_is_refused_for_several_ranks_only(tmp_path: Path) -> None:
    """In its files one tensor holds several of the model's, each of its own name."""
    config = AutoConfig.for_model("hrm_text", **LAYERS, head_dim=8)
    with pytest.raises(ModelError, match=r"HrmText.* its files hold .*\n  -> set cluster\.num_workers=1"):
        FileNames(skeleton(config))
    model = AutoModelForCausalLM.from_config(config)
    save_model(model, tmp_path, tokenizer=tiny_tokenizer(), dtype=torch.bfloat16)
    again = load_model(ModelConfig(path=str(tmp_path)), device=torch.device("cpu"), dtype=torch.bfloat16)
    assert equal(weights_of(again), weights_of(model.to(torch.bfloat16)))
