"""Two ranks on two nodes of Ray, called as one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.errors import ModelError
from tandem.model.ranks import Ranks
from tandem.runtime.ray import RayGroup
from tests.unit.runtime.worker import SETTINGS, Worker


@pytest.fixture(scope="module")
def group(two_nodes: str) -> Iterator[RayGroup[Worker]]:
    group = RayGroup(Worker, SETTINGS, num_workers=2, device_type="cpu", address=two_nodes)
    yield group
    group.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """Who reads it waits for who writes it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_each_rank_is_a_process_on_a_node_in_the_controllers_folder(group: RayGroup[Worker]) -> None:
    (ranks_0, pid_0, folder_0), (ranks_1, pid_1, folder_1) = group.call_each(Worker.identity)
    assert (ranks_0, ranks_1) == (Ranks(0, 2, local_size=1), Ranks(1, 2, local_size=1))
    assert len({pid_0, pid_1, os.getpid()}) == 3
    assert folder_0 == folder_1 == os.getcwd()


def test_ranks_reach_each_other(group: RayGroup[Worker]) -> None:
    for total, names in group.call_each(Worker.collectives):
        assert total.tolist() == [3.0, 30.0]
        assert names == ["rank 0", "rank 1"]


def test_settings_are_in_force_in_the_workers_only(group: RayGroup[Worker]) -> None:
    assert group.call_each(Worker.settings) == [(2, True)] * 2
    assert group.start(Worker.settings).result()[0] == 2
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("size", [10, 1_000_000])  # with the call, and by way of the object store
def test_the_first_ranks_result_comes_back_and_arguments_are_its_own(group: RayGroup[Worker], size: int) -> None:
    tensor = torch.arange(size, dtype=torch.float32)
    assert torch.equal(group.call(Worker.doubled_in_place, tensor), 2 * torch.arange(size))
    assert tensor[-1] == size - 1


def test_a_stream_has_what_every_rank_yields(group: RayGroup[Worker]) -> None:
    items = list(group.stream(Worker.count, 50))
    assert sorted(items) == [(rank, number) for rank in (0, 1) for number in range(50)]
    assert [number for rank, number in items if rank == 1] == list(range(50))


def test_items_of_a_stream_come_as_they_are_yielded(group: RayGroup[Worker], pipe: Path) -> None:
    stream = group.stream(Worker.one_before_the_other, pipe)
    assert next(stream) == 1
    pipe.write_bytes(b"go on")
    assert list(stream) == [0]


def test_a_stream_that_is_left_runs_to_its_end(group: RayGroup[Worker]) -> None:
    stream = group.stream(Worker.count, 1000)
    next(stream)
    del stream
    assert group.call(Worker.collectives)[1] == ["rank 0", "rank 1"]


def test_what_is_started_runs_beside_calls_one_after_the_other(group: RayGroup[Worker], pipe: Path) -> None:
    first = group.start(Worker.wait_for, pipe, "first")
    second = group.start(Worker.wait_for, pipe, "second")
    assert "first" not in group.call(Worker.names)
    assert not first.done()
    pipe.write_bytes(b"")
    assert first.result() == "first"
    pipe.write_bytes(b"")
    assert second.result() == "second"
    assert [names[-2:] for names in group.call_each(Worker.names)] == [["first", "second"]] * 2


def test_what_is_started_may_raise(group: RayGroup[Worker]) -> None:
    with pytest.raises(ModelError, match="no such model"):
        group.start(Worker.raise_model_error).result()
    assert group.call(Worker.settings) == (2, True)


def test_an_error_for_users_keeps_its_remedy(group: RayGroup[Worker]) -> None:
    with pytest.raises(ModelError) as raised:
        group.call(Worker.raise_model_error)
    assert raised.value.message == "no such model"
    assert raised.value.remedy == "take another one"
    assert str(raised.value) == str(ModelError("no such model", remedy="take another one"))
    assert group.call(Worker.settings) == (2, True)  # all ranks stand where they stood


def test_a_call_within_a_running_event_loop(group: RayGroup[Worker]) -> None:
    async def in_notebook() -> tuple[int, bool]:
        return group.call(Worker.settings)

    assert asyncio.run(in_notebook()) == (2, True)


def test_a_call_from_another_thread(group: RayGroup[Worker]) -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(group.call(Worker.settings)))
    thread.start()
    thread.join()
    assert results == [(2, True)]
