"""From FSDP shards to the engine's slices and back: no changed bit, no byte too many, no large buffer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Columns
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from tandem.model.layouts import local
from tandem.model.ranks import ALONE, Ranks
from tandem.model.reshard import Resharder
from tandem.model.shards import Shard
from tandem.model.skeleton import materialise, skeleton
from tests.ranks import RankProcesses
from tests.tiny import ARCHITECTURES, tiny_model

CPU = torch.device("cpu")
WITH_PLAN = [name for name in ARCHITECTURES if name != "GPT2LMHeadModel"]


def trainer_shards(model: PreTrainedModel, mesh: DeviceMesh) -> dict[str, Shard]:
    """The rows of the model's weights that FSDP gives to this rank."""
    sharded = skeleton(model.config)
    for layer in sharded.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    weights = dict(model.named_parameters())
    shards: dict[str, Shard] = {}
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = weights[name].detach()
        rows = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None).to_local()
        _, (first_row, *_) = compute_local_shape_and_global_offset(whole.shape, mesh, parameter.placements)
        shards[name] = Shard(rows.clone(), tuple(whole.shape), first_row if len(rows) else len(whole))
    return shards


def engine_model(config: PreTrainedConfig, mesh: DeviceMesh | None, dtype: torch.dtype) -> PreTrainedModel:
    """The engine's model, cut by the plan of transformers, its content arbitrary; the head in float32."""
    model = skeleton(config).to(dtype)
    model.lm_head.float()
    if mesh is not None:
        apply_tensor_parallelism(model, mesh)
        model.tie_weights()
    materialise(model, CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).fill_(float("nan"))
    return model


def wrong_parts(model: PreTrainedModel, engine: PreTrainedModel) -> list[str]:
    """The names of parameters of which the engine does not hold exactly its part."""
    wrong: list[str] = []
    weights = dict(model.named_parameters())
    for name, parameter in engine.named_parameters():
        expected = weights[name].detach().to(parameter.dtype)
        if isinstance(parameter, DTensor):
            cut = distribute_tensor(expected, parameter.device_mesh, parameter.placements, src_data_rank=None)
            expected = cut.to_local()
        if not torch.equal(local(parameter), expected):
            wrong.append(name)
    return wrong


def there_and_back(
    ranks: Ranks,
    architecture: str,
    fsdp: tuple[int, ...],
    tensor_parallel: int,
    dtype: torch.dtype,
    tie: bool,
    bucket: int,
) -> dict[str, object]:
    """What a move to the engine and, in float32, back again made of the weights."""
    model = tiny_model(architecture, tie=tie)
    names = ("replicate", "shard")[-len(fsdp) :]
    shards = trainer_shards(model, init_device_mesh("cpu", fsdp, mesh_dim_names=names))
    mesh = init_device_mesh("cpu", (ranks.size // tensor_parallel, tensor_parallel), mesh_dim_names=("replica", "tp"))
    engine = engine_model(model.config, mesh["tp"] if tensor_parallel > 1 else None, dtype)
    parameters = dict(engine.named_parameters())

    moved = Resharder(ranks, shards, parameters, bucket_bytes=bucket).run(shards, parameters)
    wrong = wrong_parts(model, engine)
    assert (engine.lm_head.weight is engine.get_input_embeddings().weight) == tie
    if dtype == torch.float32:
        back = {
            name: Shard(shard.tensor.clone().fill_(0), shard.shape, shard.first_row) for name, shard in shards.items()
        }
        Resharder(ranks, parameters, back, bucket_bytes=bucket).run(parameters, back)
        wrong += [f"{name}, back" for name, shard in shards.items() if not torch.equal(shard.tensor, back[name].tensor)]
    return {"wrong": wrong, "moved": moved.bytes_moved, "least": moved.bytes_least, "buffers": moved.buffer_bytes}


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", WITH_PLAN)
def test_every_architecture(ranks: RankProcesses, architecture: str, tie: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for result in ranks.run(there_and_back, 2, architecture, (2,), 2, dtype, tie, 2**20):
            assert result["wrong"] == []


def test_buckets_smaller_than_any_row(ranks: RankProcesses) -> None:
    for result in ranks.run(there_and_back, 2, "Qwen3MoeForCausalLM", (2,), 2, torch.float32, True, 250):
        assert result["wrong"] == []
        assert 0 < result["buffers"] <= 250


def test_uneven_and_empty_shards(ranks: RankProcesses) -> None:
    """Three ranks share 64 rows as 22, 22 and 20 and four experts as 2, 2 and none; each has a whole engine."""
    results = ranks.run(there_and_back, 3, "Qwen3MoeForCausalLM", (3,), 1, torch.float32, False, 10_000)
    for result in results:
        assert result["wrong"] == []
        assert result["buffers"] <= 10_000
        assert result["moved"] == result["least"]


@pytest.mark.parametrize("fsdp", [(4,), (2, 2)], ids=["FSDP over 4", "HSDP, 2 copies on 2"])
def test_two_replicas_of_two_ranks(ranks: RankProcesses, fsdp: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for result in ranks.run(there_and_back, 4, "Qwen3ForCausalLM", fsdp, 2, dtype, True, 50_000):
            assert result["wrong"] == []
            assert result["moved"] == result["least"]
            assert result["buffers"] <= 50_000


def test_the_bytes_are_those_that_are_missing(ranks: RankProcesses) -> None:
    """[6, 4] in rows of 3, wanted in columns of 2: of 12 elements each rank has 6; and as a whole, 12 of 24."""

    def move(ranks: Ranks) -> list[tuple[int, int]]:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(24.0).view(6, 4)
        rows = {"weight": Shard(whole[3 * ranks.rank : 3 * ranks.rank + 3].clone(), (6, 4), 3 * ranks.rank)}
        columns = distribute_tensor(torch.empty(6, 4, dtype=torch.bfloat16), mesh, [Columns(1)], src_data_rank=None)
        moved = []
        for target in (columns, torch.empty(6, 4)):
            result = Resharder(ranks, rows, {"weight": target}).run(rows, {"weight": target})
            moved.append((result.bytes_moved, result.bytes_least))
            assert torch.equal(local(target), whole[:, 2 * ranks.rank :][:, :2] if target is columns else whole)
        return moved

    assert ranks.run(move, 2) == [[(2 * 6 * 2, 2 * 6 * 2), (2 * 12 * 4, 2 * 12 * 4)]] * 2


def test_a_plan_serves_weights_that_have_changed_and_memory_made_anew(ranks: RankProcesses) -> None:
    def move_twice(ranks: Ranks) -> list[bool]:
        same = []
        resharder = None
        for seed in (0, 1):
            whole = torch.randn(10, 6, generator=torch.Generator().manual_seed(seed))
            source = {"weight": Shard(whole[5 * ranks.rank : 5 * ranks.rank + 5].clone(), (10, 6), 5 * ranks.rank)}
            target = {"weight": torch.empty(10, 6)}
            resharder = resharder or Resharder(ranks, source, {"weight": torch.empty(10, 6, device="meta")})
            resharder.run(source, target)
            same.append(torch.equal(target["weight"], whole))
        return same

    assert ranks.run(move_twice, 2) == [[True, True]] * 2


def test_the_extra_memory_is_one_bucket(ranks: RankProcesses, tmp_path: Path) -> None:
    """Counted by the profiler, which sees every allocation: 16 MiB of weights, cast and cut by columns, in 1 MiB."""
    bucket = 2**20

    def measure(ranks: Ranks, folder: Path) -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (2,))
        source = {"large": Shard(torch.ones(1024, 2048), (2048, 2048), 1024 * ranks.rank)}
        parts = distribute_tensor(torch.empty(2048, 2048, dtype=torch.bfloat16), mesh, [Columns(1)], src_data_rank=None)
        target = {"large": parts}
        resharder = Resharder(ranks, source, target, bucket_bytes=bucket)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            moved = resharder.run(source, target)
        trace = folder / f"{ranks.rank}.json"
        profiler.export_chrome_trace(str(trace))
        sizes = [event["args"] for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
        before = sizes[0]["Total Allocated"] - sizes[0]["Bytes"]
        assert bool((local(parts) == 1).all())
        return max(size["Total Allocated"] for size in sizes) - before, moved.buffer_bytes

    for peak, buffers in ranks.run(measure, 2, tmp_path):
        assert bucket * 0.9 < buffers <= bucket
        assert buffers <= peak <= bucket


def test_alone_nothing_travels() -> None:
    source = {"weight": Shard.whole(torch.arange(12.0).view(3, 4)), "number": Shard.whole(torch.tensor(7.0))}
    target: Mapping[str, Tensor] = {"weight": torch.zeros(3, 4, dtype=torch.bfloat16), "number": torch.zeros(())}
    moved = Resharder(ALONE, source, target).run(source, target)
    assert (moved.bytes_moved, moved.bytes_least, moved.buffer_bytes) == (0, 0, 0)
    assert torch.equal(target["weight"].float(), source["weight"].tensor)
    assert target["number"] == 7
