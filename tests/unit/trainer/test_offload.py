from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tandem.errors import TrainingError
from tandem.model.ranks import Ranks
from tandem.trainer.offload import Offload
from tests.ranks import RankProcesses


@pytest.fixture(params=["host", "disk"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Offload]:
    made = Offload(request.param, tmp_path / "offload")
    yield made
    made.close()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def allocated(*tensors: Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().clone().view(-1).view(torch.uint8).tolist())


def test_content_comes_back_to_the_bit(offload: Offload) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    tensors = [noise(5, 3), noise(7).bfloat16(), torch.tensor(3.5), torch.arange(4), torch.tensor([True, False]), odd]
    before = [bits(tensor) for tensor in tensors]
    offload.away(tensors)
    assert allocated(*tensors) == 0
    offload.back()
    assert [bits(tensor) for tensor in tensors] == before


def test_tensors_larger_than_a_block_are_cut(offload: Offload) -> None:
    small, large, last = noise(3), noise(9 * 2**20 + 1, seed=1), noise(5, seed=2)  # 36 MiB and 4 bytes, blocks of 16
    before = [tensor.clone() for tensor in (small, large, last)]
    for _ in range(2):
        offload.away([small, large, last])
        offload.back()
    assert all(torch.equal(now, then) for now, then in zip((small, large, last), before, strict=True))


def test_the_content_is_that_of_the_last_time_whatever_was_moved_before(offload: Offload) -> None:
    offload.away([noise(100_000)])
    offload.back()
    tensors = [noise(10, seed=1), noise(20, seed=2)]
    for _ in range(3):
        before = [tensor.add_(1).clone() for tensor in tensors]
        offload.away(tensors)
        offload.back()
        assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


def test_who_holds_a_view_sees_the_content_again(offload: Offload) -> None:
    flat = noise(64)  # as FSDP keeps a shard: flat, with padding, and views of it in its own shape
    shard = nn.Parameter(flat[:60].view(12, 5))
    rows = shard.detach()[2:4]
    before, rows_before = flat.clone(), rows.clone()
    address = id(shard)
    offload.away([shard])
    assert allocated(flat, rows) == 0
    offload.back()
    assert id(shard) == address
    assert torch.equal(flat, before)
    assert torch.equal(rows, rows_before)
    with torch.no_grad():
        shard[2, 0] = 9.0
    assert flat[10] == rows[0, 0] == 9.0


def test_tied_tensors_stay_tied(offload: Offload) -> None:
    embedding = nn.Embedding(50, 8)
    head = nn.Linear(8, 50, bias=False)
    head.weight = embedding.weight
    view = embedding.weight.detach().view(-1)
    before = view.clone()
    offload.away([embedding.weight, head.weight, view])
    assert allocated(embedding.weight, view) == 0
    offload.back()
    assert torch.equal(head.weight.detach().view(-1), before)
    assert head.weight.data_ptr() == embedding.weight.data_ptr() == view.data_ptr()


def test_the_optimizer_goes_on_as_if_nothing_had_been_away(offload: Offload) -> None:
    def trained(moves: bool) -> Tensor:
        weight = nn.Parameter(noise(40, 30))
        adamw = torch.optim.AdamW([weight], lr=0.1, fused=True)
        for step in range(4):
            weight.grad = noise(40, 30, seed=step + 1)
            adamw.step()
            adamw.zero_grad(set_to_none=True)
            if moves:
                state = [value for values in adamw.state.values() for value in values.values()]
                offload.away([weight, *state])
                assert allocated(weight, *state) == 0
                offload.back()
        return weight.detach()

    assert torch.equal(trained(moves=True), trained(moves=False))


def test_what_was_empty_stays_empty(offload: Offload) -> None:
    freed, without_rows = noise(8), torch.empty(0, 3)
    freed.untyped_storage().resize_(0)
    offload.away([freed, without_rows])
    offload.back()
    assert allocated(freed, without_rows) == 0


def test_none_leaves_tensors_where_they_are() -> None:
    tensor = noise(8)
    offload = Offload("none")
    for _ in range(2):  # a second `away` without a `back` is no mistake here: nothing is away
        offload.away([tensor])
        assert allocated(tensor) == 32
    offload.back()
    assert torch.equal(tensor, noise(8))


def test_what_is_away_stays_away_when_asked_again(offload: Offload) -> None:
    """As in two rollout phases with nothing in between."""
    offload.back()  # nothing is away
    tensor = noise(8)
    for _ in range(2):
        offload.away([tensor])
        assert tensor.untyped_storage().nbytes() == 0
    offload.back()
    assert torch.equal(tensor, noise(8))


def test_memory_that_numpy_points_into_is_refused(offload: Offload) -> None:
    tensor = noise(8)
    array = tensor.numpy()
    with pytest.raises(AssertionError, match="another owner"):
        offload.away([tensor])
    assert array[0] == tensor[0]


def test_fault_41_disk_full_is_a_clear_error_and_nothing_is_lost(tmp_path: Path) -> None:
    tensors = [noise(2**20), noise(8 * 2**20, seed=1)]  # 4 and 32 MiB
    before = [tensor.clone() for tensor in tensors]
    offload = Offload("disk", tmp_path)
    offload.away(tensors[:1])
    offload.back()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 2**20, limits[1]))
    try:
        with pytest.raises(
            TrainingError, match=rf"cannot write offloaded tensors in {tmp_path}: File too large"
        ) as error:
            offload.away(tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "trainer.offload=none" in (error.value.remedy or "")
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
    offload.away(tensors)  # there is room again
    offload.back()
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
    offload.close()


def test_a_disk_that_cannot_be_read_is_a_clear_error_and_nothing_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_file: int, _buffers: list[memoryview]) -> int:
        raise OSError(errno.EIO, "Input/output error")

    tensor = noise(8)
    offload = Offload("disk", tmp_path)
    offload.away([tensor])
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", failing)
        with pytest.raises(TrainingError, match=rf"cannot read offloaded tensors in {tmp_path}: Input/output error"):
            offload.back()
    offload.back()
    assert torch.equal(tensor, noise(8))
    offload.close()


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=r"cannot write offloaded tensors in .*file/offload: Not a directory"):
        Offload("disk", tmp_path / "file" / "offload")


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    program = f"""
    import os, signal, torch
    from pathlib import Path
    from tandem.trainer.offload import Offload
    Offload("disk", Path({str(tmp_path)!r})).away([torch.ones(1000)])
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_resident_memory_falls_by_gradients_moments_and_weights(tmp_path: Path) -> None:
    """At least 90 % of 80 MB in tensors of many sizes, as an optimizer makes them; measured in a process of its own."""
    program = f"""
    import torch
    from pathlib import Path
    from tandem.observe.memory import bytes_in_use
    from tandem.trainer.offload import Offload

    torch.set_num_threads(1)
    weights = [torch.nn.Parameter(torch.ones(rows, 512)) for rows in (4096, *[512] * 8, *[1] * 40)]
    adamw = torch.optim.AdamW(weights, fused=True)
    offload = Offload("disk", Path({str(tmp_path)!r}))
    for step in range(3):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        adamw.step()
        moved = [*weights, *(weight.grad for weight in weights)]
        moved += [value for state in adamw.state.values() for value in state.values()]
        before = bytes_in_use(torch.device("cpu"))
        offload.away(moved)
        after = bytes_in_use(torch.device("cpu"))
        offload.back()
        adamw.zero_grad(set_to_none=True)
        print(sum(tensor.nbytes for tensor in moved), before - after)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, capture_output=True, text=True)
    lines = [[int(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert len(lines) == 3
    for size, freed in lines:
        assert size > 60 * 2**20
        assert freed >= 0.9 * size


def test_fsdp_goes_on_with_the_same_numbers(ranks: RankProcesses, tmp_path: Path) -> None:
    def losses(_: Ranks, offload: Offload) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1))  # 7 rows on 2 ranks: one shard is padded
        fully_shard(model[0])
        fully_shard(model)
        adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
        own = [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]
        found = []
        for _ in range(4):
            loss = model(torch.ones(3, 8)).square().sum()
            loss.backward()
            model.reshard()
            adamw.step()
            adamw.zero_grad(set_to_none=True)
            found.append(float(loss.detach()))
            moments = [value for values in adamw.state.values() for value in values.values()]
            offload.away([*own, *(each.to_local() if isinstance(each, DTensor) else each for each in moments)])
            offload.back()
        offload.close()
        return found

    def moving(ranks: Ranks) -> list[float]:
        return losses(ranks, Offload("disk", tmp_path))  # both ranks in one folder

    def staying(ranks: Ranks) -> list[float]:
        return losses(ranks, Offload("none"))

    assert ranks.run(moving, 2) == ranks.run(staying, 2)
