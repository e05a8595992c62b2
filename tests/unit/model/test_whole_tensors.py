"""Whole tensors from the ranks' shards: those of the model's files, equal to the bit, never more than a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from tandem.model.file_names import FileNames
from tandem.model.ranks import ALONE, Ranks
from tandem.model.skeleton import skeleton
from tandem.model.whole_tensors import WholeTensors
from tests.ranks import RankProcesses
from tests.tiny import tiny_model
from tests.unit.model.test_reshard import trainer_shards

CPU = torch.device("cpu")
BUCKET = 20_000  # bytes: less than the embedding takes
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel")


def published(folder: Path, architecture: str, *, tie: bool) -> dict[str, torch.Tensor]:
    """What transformers itself writes."""
    tiny_model(architecture, tie=tie).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def read_on_ranks(ranks: Ranks, architecture: str, tie: bool) -> tuple[dict[str, torch.Tensor], int]:
    """All tensors, in bfloat16; and the most bytes that were held at a time by a reader who keeps none."""
    model = tiny_model(architecture, tie=tie)
    shards = trainer_shards(model, init_device_mesh("cpu", (ranks.size,)))
    names = FileNames(skeleton(model.config))
    whole = WholeTensors(ranks, model, shards, names=names, dtype=torch.bfloat16, device=CPU, bucket_bytes=BUCKET)
    read: dict[str, torch.Tensor] = {}
    for _ in range(2):  # the plan serves again
        read = {name: tensor.clone() for name, tensor in whole.read(shards)}
    held = {tensor.untyped_storage().nbytes() for _, tensor in whole.read(shards)}
    assert whole.bytes_moved > 0
    return read, max(held)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES[:2])
def test_two_ranks_put_together_what_files_hold(
    ranks: RankProcesses, tmp_path: Path, architecture: str, tie: bool
) -> None:
    expected = published(tmp_path, architecture, tie=tie)
    for read, held in ranks.run(read_on_ranks, 2, architecture, tie):
        assert set(read) - set(expected) == ({"lm_head.weight"} if tie else set())
        for name, tensor in expected.items():
            assert torch.equal(read[name], tensor.bfloat16()), name
        assert torch.equal(read["lm_head.weight"], read["model.embed_tokens.weight"]) == tie
        assert held <= max(BUCKET, *(2 * weight.numel() for weight in tiny_model(architecture, tie=tie).parameters()))


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_rank_hands_out_its_own_memory(tmp_path: Path, architecture: str, tie: bool) -> None:
    expected = published(tmp_path, architecture, tie=tie)
    model = tiny_model(architecture, tie=tie)
    whole = WholeTensors(ALONE, model, {}, names=None, dtype=torch.float32, device=CPU)
    read = dict(whole.read({}))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert set(read) - set(expected) == ({"lm_head.weight"} if tie else set())
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name
        assert read[name].untyped_storage().data_ptr() in own
    assert whole.bytes_moved == 0
