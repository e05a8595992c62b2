"""Files written by some ranks and read by others. A rank is its shards here: they need no process group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tandem.model.tensor_files as tensor_files
from tandem.model.shards import Shard
from tandem.model.tensor_files import copy, read, stored_tensors, write
from tests.cut import cut, empty


def tensors() -> dict[str, Tensor]:
    """Of several dtypes and shapes, one number among them, and fewer rows than there are ranks."""
    generator = torch.Generator().manual_seed(0)
    return {
        "layers.0.weight": torch.randn(7, 3, generator=generator),
        "layers.0.bias": torch.randn(2, generator=generator),
        "step": torch.tensor(5.0),
        "half": torch.randn(5, 2, 3, generator=generator).bfloat16(),
        "count": torch.arange(4),
    }


def write_all(folder: Path, ranks: Sequence[Mapping[str, Shard]], *, dtype: torch.dtype | None = None) -> None:
    for rank in reversed(range(len(ranks))):  # the leader last: its header must leave the others' ranges as they are
        write(folder, ranks[rank], dtype=dtype, lead=rank == 0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_file_is_the_one_that_safetensors_writes(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 16)  # all but the smallest shards are moved in several parts
    write_all(tmp_path / "ours", cut(tensors(), size))
    save_file(tensors(), tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("written_by", [1, 2, 3])
@pytest.mark.parametrize("read_by", [1, 2, 4])
def test_fault_40_what_some_ranks_wrote_any_number_reads(
    tmp_path: Path, written_by: int, read_by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 16)
    write_all(tmp_path, cut(tensors(), written_by))
    for expected in cut(tensors(), read_by):
        found = empty(expected)
        read(tmp_path, found)
        assert {name: each.tensor.tolist() for name, each in found.items()} == {
            name: each.tensor.tolist() for name, each in expected.items()
        }


def test_only_the_primary_of_equal_shards_writes(tmp_path: Path) -> None:
    (shards,) = cut(tensors(), 1)
    copies = {
        name: replace(each, tensor=torch.full_like(each.tensor, 9), primary=False) for name, each in shards.items()
    }
    write_all(tmp_path, [shards, copies])
    write(tmp_path, copies, lead=False)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["half"], tensors()["half"])


def test_floats_are_cast_on_the_way_out_and_in(tmp_path: Path) -> None:
    write_all(tmp_path, cut(tensors(), 2), dtype=torch.bfloat16)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["count"].dtype == torch.int64
    (into,) = cut(tensors(), 1)
    found = empty({name: into[name] for name in ("layers.0.weight", "step")}, torch.float32)
    read(tmp_path, found)
    for name, each in found.items():
        assert saved[name].dtype == torch.bfloat16
        assert torch.equal(each.tensor, tensors()[name].bfloat16().float())


def test_several_files_have_an_index_and_replace_those_of_before(tmp_path: Path) -> None:
    for max_file_bytes, num_files in ((60, 4), (100, 2), (10**6, 1), (60, 4)):
        for rank, shards in enumerate(cut(tensors(), 2)):
            write(tmp_path, shards, lead=rank == 0, max_file_bytes=max_file_bytes)
        files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
        assert len(files) == num_files
        index = tmp_path / "model.safetensors.index.json"
        assert index.exists() is (num_files > 1)
        if num_files > 1:
            assert files[0] == f"model-00001-of-0000{num_files}.safetensors"
            fields = json.loads(index.read_text())
            assert fields["metadata"]["total_size"] == sum(each.nbytes for each in tensors().values())
            assert {name: load_file(tmp_path / file)[name].tolist() for name, file in fields["weight_map"].items()} == {
                name: each.tolist() for name, each in tensors().items()
            }
        (into,) = map(empty, cut(tensors(), 1))
        read(tmp_path, into)
        assert all(torch.equal(into[name].tensor, each) for name, each in tensors().items())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_copy_is_what_would_be_written_in_its_place(
    tmp_path: Path, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 16)
    (shards,) = cut(tensors(), 1)
    write(tmp_path / "source", shards, max_file_bytes=60)
    write(tmp_path / "expected", shards, dtype=dtype)
    copy(tmp_path / "source", tmp_path / "copy", dtype=dtype)
    (file,) = (tmp_path / "copy").iterdir()
    assert file.read_bytes() == (tmp_path / "expected" / file.name).read_bytes()

    copy(tmp_path / "source", tmp_path / "copy", max_file_bytes=60)
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) > 1
    (into,) = map(empty, cut(tensors(), 1))
    read(tmp_path / "copy", into)
    assert all(torch.equal(into[name].tensor, each) for name, each in tensors().items())


def test_all_that_is_missing_or_of_another_shape_is_told_at_once(tmp_path: Path) -> None:
    write_all(tmp_path, cut(tensors(), 1))
    wanted = {"gone": torch.zeros(2), **tensors(), "count": torch.zeros(5), "absent": torch.zeros(())}
    message = r"count has shape \(4,\), not \(5,\); gone is missing; absent is missing$"
    for shards in cut(wanted, 2):
        before = {name: each.tensor.clone() for name, each in shards.items()}
        with pytest.raises(ValueError, match=message):
            read(tmp_path, shards)
        assert all(torch.equal(each.tensor, before[name]) for name, each in shards.items())
    with pytest.raises(ValueError, match=r"t19 is missing; and 5 more$"):
        read(tmp_path, {f"t{i}": Shard.whole(torch.zeros(1)) for i in range(25)})


def test_what_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    write_all(tmp_path, cut(tensors(), 1))
    into = {"step": Shard.whole(torch.zeros(()))}
    read(tmp_path, into)
    assert into["step"].tensor == 5


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_truncated_file_is_damaged(tmp_path: Path, keep: int) -> None:
    write_all(tmp_path, cut(tensors(), 1))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        stored_tensors(tmp_path)


def test_a_folder_without_files_or_with_a_broken_index(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        stored_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        stored_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    with pytest.raises(FileNotFoundError):
        stored_tensors(tmp_path)
