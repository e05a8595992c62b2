"""Adapters beside frozen weights: nothing changes before they are trained, and W + scale * B A is what they compute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.model import tensor_files
from tandem.model.adapter_files import Base, fingerprint, is_adapter, read_deltas
from tandem.model.delta import Delta
from tandem.model.facts import check_model
from tandem.model.file_names import FileNames
from tandem.model.hf import load_model, load_shards, save_adapter
from tandem.model.lora import Lora, num_adapter_parameters
from tandem.model.merge import merge_adapter
from tandem.model.ranks import ALONE
from tandem.model.shards import Shard
from tandem.model.skeleton import skeleton
from tandem.model.whole_tensors import WholeTensors
from tests.tiny import tiny_model, tiny_model_folder, tiny_tokenizer

CPU = torch.device("cpu")
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel")
LORA = ModelConfig(path="policy", lora_rank=3, lora_alpha=8)
TOKENS = torch.tensor([[3, 5, 7, 4, 6, 2]])


def adapted(model: PreTrainedModel) -> Lora:
    """Put in adapters as they begin."""
    lora = Lora(model, LORA)
    lora.begin(shards_of(model), seed=0)
    return lora


def shards_of(model: PreTrainedModel) -> dict[str, Shard]:
    return {name: Shard.whole(each) for name, each in model.named_parameters() if each.requires_grad}


@torch.no_grad()
def trained(model: PreTrainedModel) -> None:
    """Move the adapters."""
    generator = torch.Generator().manual_seed(1)
    for shard in shards_of(model).values():
        shard.tensor.normal_(0.0, 0.05, generator=generator)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    model.set_attn_implementation("eager")
    return model(TOKENS).logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_at_first_and_with_adapters_off_the_model_is_its_base_to_the_bit(architecture: str) -> None:
    model = tiny_model(architecture)
    expected = logits(model)
    lora = adapted(model)
    assert torch.equal(logits(model), expected)
    trained(model)
    changed = logits(model)
    assert (changed - expected).abs().max() > 0.1
    with lora.off():
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), changed)
    with pytest.raises(KeyError), lora.off():
        raise KeyError
    assert torch.equal(logits(model), changed)


def test_only_adapters_are_trained_and_begin_alike_for_every_share_of_their_rows() -> None:
    model = tiny_model("Qwen3ForCausalLM")
    num_trained = num_adapter_parameters(LORA, model)
    before = torch.random.get_rng_state()
    lora = adapted(model)
    assert torch.equal(torch.random.get_rng_state(), before), "PyTorch's own random numbers are left alone"
    shards = shards_of(model)
    assert len(shards) == 2 * 7 * 2, "A and B of each of a layer's 7 linear layers"
    assert sum(shard.tensor.numel() for shard in shards.values()) == num_trained
    begun = {name: shard.tensor.detach().clone() for name, shard in shards.items()}
    for name, shard in shards.items():
        rows = torch.full_like(shard.tensor[1:3], 7.0)
        lora.begin({name: Shard(rows, shard.shape, first_row=1)}, seed=0)
        assert torch.equal(rows, begun[name][1:3])
        assert bool((rows == 0).all()) == (".lora_B." in name)
        assert float(rows.abs().max()) <= shard.shape[1] ** -0.5
    lora.begin(shards, seed=1)
    changed = {name for name, shard in shards.items() if not torch.equal(shard.tensor, begun[name])}
    assert changed == {name for name in shards if ".lora_A." in name}, "another seed, others"
    assert len({tuple(tensor.flatten()[:3].tolist()) for name, tensor in begun.items() if name in changed}) == 14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_delta_is_added_to_any_part_of_a_weight(transposed: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 9, generator=generator), torch.randn(7, 2, generator=generator)
    product = 0.5 * (b.double() @ a.double())
    product = product.T if transposed else product
    weight = torch.randn(product.shape, generator=generator).to(dtype)
    expected = (weight.double() + product).to(dtype)
    delta = Delta.of(a, b, 0.5, transposed=transposed)
    part = torch.cat([weight[1:3], weight[5:7]])[:, 2:6]
    delta.add_to(part, [range(1, 3), range(5, 7)], [range(2, 6)])
    wanted = torch.cat([expected[1:3], expected[5:7]])[:, 2:6]
    torch.testing.assert_close(part, wanted, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    shard = Shard(weight[2:5].clone(), tuple(weight.shape), first_row=2)
    delta.add_to_shard(shard)
    assert torch.equal(shard.tensor, delta.added_to(weight)[2:5])


def saved(folder: Path, architecture: str) -> tuple[PreTrainedModel, Lora, Path]:
    """A base and an adapter for it in folders below; the adapted model, and the adapter's folder."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder(folder / "base", architecture))
    lora = adapted(model)
    trained(model)
    save_adapter(
        model,
        folder / "adapter",
        tokenizer=tiny_tokenizer(),
        shards=shards_of(model),
        lora=lora,
        base=Base.of(str(folder / "base")),
    )
    return model, lora, folder / "adapter"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_adapter_in_a_folder_is_read_merged_and_handed_out_as_the_same_model(
    tmp_path: Path, architecture: str
) -> None:
    """1e-4 of logits of size 10: a sum in another order."""
    model, lora, folder = saved(tmp_path, architecture)
    expected = logits(model)
    assert is_adapter(folder)
    assert not is_adapter(tmp_path / "base")
    loaded = load_model(ModelConfig(path=str(folder)), device=CPU, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-4)

    names = FileNames(skeleton(loaded.config))
    rows = {
        name: Shard(torch.zeros(len(each[1:]), *each.shape[1:]), tuple(each.shape), 1)
        for name, each in loaded.named_parameters()
    }
    load_shards(ModelConfig(path=str(folder)), loaded, rows, names=names)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(rows[name].tensor, parameter[1:], rtol=0, atol=1e-6)

    whole = WholeTensors(ALONE, model, {}, names=names, dtype=torch.float32, device=CPU, lora=lora)
    handed_out = dict(whole.read({}))
    merge_adapter(folder, dtype=torch.float32)
    assert not is_adapter(folder)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)
    written = load_file(folder / "model.safetensors")
    assert written.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    for name, tensor in written.items():
        torch.testing.assert_close(handed_out[name], tensor, rtol=0, atol=1e-6)


def test_a_merge_in_small_pieces_is_the_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not fill a piece."""
    _, _, folder = saved(tmp_path, "GPT2LMHeadModel")
    deltas = read_deltas(folder)
    base = load_file(tmp_path / "base" / "model.safetensors")
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 2500)
    tensor_files.copy(tmp_path / "base", tmp_path / "merged", deltas=deltas)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == base.keys()
    for name, tensor in merged.items():
        expected = deltas[name].added_to(base[name]) if name in deltas else base[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)
    assert sum(not torch.equal(merged[name], base[name]) for name in base) == len(deltas)


def test_a_base_is_known_by_its_weights(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "one", seed=0)
    same, other, shape = (tmp_path / name for name in ("same", "other", "shape"))
    tiny_model_folder(same, seed=0)
    tiny_model_folder(other, seed=1)
    tiny_model_folder(shape, overrides={"intermediate_size": 80})
    found = [fingerprint(str(each)) for each in (folder, same, other, shape)]
    assert found[0] == found[1]
    assert len(set(found)) == 3
    (other / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        fingerprint(str(other))


def test_what_cannot_get_adapters_is_said_before_weights_are_read(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not read")
    config = ModelConfig(path=str(folder), lora_rank=2, lora_targets=["q_proj", "lm_head", "query"])
    with pytest.raises(ModelError) as caught:
        check_model(config)
    assert "Qwen3ForCausalLM has no linear layer lm_head, query in its body" in caught.value.message
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(caught.value.remedy)
    facts = check_model(config.model_copy(update={"lora_targets": ["q_proj"]}))
    assert facts.num_adapter_parameters == 2 * 2 * (64 + 64)
    assert facts.num_parameters > 10_000


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "GPT2LMHeadModel"])
def test_a_rank_above_that_of_every_weight_is_refused(tmp_path: Path, architecture: str) -> None:
    """All linear layers of the tiny models have a side of 64 at most, and one with no shorter side."""
    config = ModelConfig(path=str(tiny_model_folder(tmp_path / "model", architecture)), lora_rank=64)
    assert check_model(config).num_adapter_parameters > 0
    with pytest.raises(ModelError, match=r"model\.lora_rank is 65, .* wider than 64\n.*set it to 64 at most"):
        check_model(config.model_copy(update={"lora_rank": 65}))


def test_the_largest_rank_is_that_of_the_layers_that_get_adapters(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny_model_folder(tmp_path / "model")), lora_rank=33, lora_targets=["k_proj"])
    with pytest.raises(ModelError, match="wider than 32"):
        check_model(config)


@pytest.mark.parametrize("file", ["adapter_config.json", "base.json", "adapter_model.safetensors"])
def test_a_damaged_adapter_is_a_model_error(tmp_path: Path, file: str) -> None:
    _, _, folder = saved(tmp_path, "Qwen3ForCausalLM")
    (folder / file).write_text("{}")
    with pytest.raises(ModelError, match=re.escape(str(folder))):
        load_model(ModelConfig(path=str(folder)), device=CPU, dtype=torch.float32)
