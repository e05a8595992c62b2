"""Which checkpoints are kept, and what a failed write does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tandem.checkpoint import (
    CheckpointWriter,
    complete_checkpoints,
    host_shards,
    optimizer_shards,
    read_moments,
    read_state,
    write_moments,
)
from tandem.errors import CheckpointError
from tandem.model.shards import Shard

METRIC = "pass@1"


def save_nothing(folder: Path) -> None:
    (folder / "model").mkdir()


def disk_is_full(folder: Path) -> None:
    raise OSError(28, "No space left on device")


def write_step(
    writer: CheckpointWriter, step: int, score: float | None = None, save: Callable[[Path], None] = save_nothing
) -> None:
    evaluation = {} if score is None else {METRIC: score, "reward": -score}
    writer.write(step, {"note": "mine"}, evaluation, save)


def writer_of(folder: Path, *, keep: int = 1, keep_best: int = 0, background: bool = True) -> CheckpointWriter:
    return CheckpointWriter(folder, keep=keep, keep_best=keep_best, metric=METRIC, background=background)


def kept_of(folder: Path, scores: Sequence[float | None], *, keep: int, keep_best: int) -> list[int]:
    writer = writer_of(folder, keep=keep, keep_best=keep_best)
    for step, score in enumerate(scores, start=1):
        write_step(writer, step, score)
    writer.wait()
    return [int(read_state(path)["step"]) for path in complete_checkpoints(folder)]


@pytest.mark.parametrize(
    ("scores", "keep", "keep_best", "expected"),
    [
        ([0.2, 0.9, 0.5, 0.1], 1, 1, [2, 4]),
        ([0.2, 0.9, 0.9, 0.1], 1, 1, [2, 4]),  # the earlier of equals, as the run counts it
        ([None, 0.9, None, None], 2, 1, [2, 3, 4]),
        ([0.3, 0.1, 0.2, 0.4], 1, 2, [1, 4]),
        ([0.3, 0.1, 0.2, 0.1], 2, 0, [3, 4]),
        ([0.3, float("nan"), 0.2, 0.1], 1, 2, [1, 3, 4]),
    ],
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, scores: Sequence[float | None], keep: int, keep_best: int, expected: list[int]
) -> None:
    assert kept_of(tmp_path, scores, keep=keep, keep_best=keep_best) == expected


def test_when_another_metric_decides_the_best_are_those_by_it(tmp_path: Path) -> None:
    """A run that goes on with another `evaluation.metric`: numbers of the two are not held against each other."""
    assert kept_of(tmp_path, [0.2, 0.9, 0.5], keep=1, keep_best=3) == [1, 2, 3]
    writer = CheckpointWriter(tmp_path, keep=1, keep_best=1, metric="reward", background=False)
    write_step(writer, 4)
    assert [int(read_state(path)["step"]) for path in complete_checkpoints(tmp_path)] == [1, 4]


def test_tensors_are_copied_for_the_background_only() -> None:
    """Copies take three times the memory of the weights."""
    weight = torch.zeros(3)
    copied, shared = (host_shards({"w": Shard.whole(weight)}, copy=copy)["w"].tensor for copy in (True, False))
    weight.fill_(1.0)
    assert copied.tolist() == [0.0] * 3
    assert shared.tolist() == [1.0] * 3


def adamw_of(rows: slice, *, updates: int) -> tuple[dict[str, Shard], torch.optim.AdamW]:
    """What a rank with these rows of a weight has. "late" is on the first rank, and has had no gradient yet."""
    weight = nn.Parameter(torch.zeros(5, 2)[rows])
    late = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weight, late], lr=0.1, fused=True)
    for update in range(1, updates + 1):
        weight.grad = update * torch.arange(10.0).view(5, 2)[rows]
        optimizer.step()
    return {"w": Shard(weight, (5, 2), rows.start), "late": Shard(late, (3,), primary=rows.start == 0)}, optimizer


def test_fault_40_moments_of_two_ranks_come_back_on_three_and_on_one(tmp_path: Path) -> None:
    written: list[dict[str, Shard]] = []
    for rows in (slice(0, 3), slice(3, 5)):
        written.append(optimizer_shards(*adamw_of(rows, updates=2)))
        write_moments(tmp_path, written[-1], lead=rows.start == 0)
    for rows in (slice(0, 5), slice(0, 2), slice(2, 4), slice(5, 5)):  # the last one has no rows
        weights, optimizer = adamw_of(rows, updates=0)
        read_moments(tmp_path, optimizer_shards(weights, optimizer))
        state = optimizer.state[weights["w"].tensor]
        for key in ("exp_avg", "exp_avg_sq"):
            whole = torch.cat([shards[f"{key}.w"].tensor for shards in written])
            assert whole.count_nonzero() == 9
            assert torch.equal(state[key], whole[rows])
        assert state["step"] == 2
        assert optimizer.state[weights["late"].tensor]["step"] == 0


def test_moments_of_another_model_are_refused(tmp_path: Path) -> None:
    write_moments(tmp_path, optimizer_shards(*adamw_of(slice(0, 5), updates=1)))
    other = {"exp_avg.w": Shard.whole(torch.zeros(5, 3)), "step.v": Shard.whole(torch.zeros(()))}
    message = r"cannot be loaded: .*exp_avg\.w has shape \(5, 2\), not \(5, 3\); step\.v is missing\n  -> it belongs to"
    with pytest.raises(CheckpointError, match=message):
        read_moments(tmp_path, other)


def test_the_state_comes_back_and_one_of_an_older_format_is_told(tmp_path: Path) -> None:
    kept_of(tmp_path, [0.5], keep=1, keep_best=0)
    (path,) = complete_checkpoints(tmp_path)
    state = read_state(path)
    assert state["note"] == "mine"
    (path / "state.json").write_text(json.dumps({**state, "format": 1}))
    with pytest.raises(CheckpointError, match="has format 1, this version reads 2"):
        read_state(path)


@pytest.mark.parametrize("background", [True, False])
def test_fault_41_a_write_that_fails_is_told_and_what_was_there_stays(tmp_path: Path, background: bool) -> None:
    writer = writer_of(tmp_path, background=background)
    write_step(writer, 1)
    with pytest.raises(CheckpointError, match=r"No space left on device\n  -> free disk space"):
        write_and_wait(writer)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000001"]
    write_step(writer, 3)
    writer.wait()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000003"]


def write_and_wait(writer: CheckpointWriter) -> None:
    write_step(writer, 2, save=disk_is_full)
    writer.wait()


def test_leftovers_of_a_killed_process_are_removed_and_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("step_000003.partial", "step_000001.deleted", "step_000002", "mine.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000002"]
    writer_of(tmp_path).clean()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_000002", "mine.partial"}


@pytest.mark.parametrize("name", ["best_step_000001", "step_000001_best", "step_000009 (copy)", "step_1"])
def test_a_folder_of_the_users_own_is_no_checkpoint_and_is_never_deleted(tmp_path: Path, name: str) -> None:
    writer = writer_of(tmp_path)
    write_step(writer, 1)
    writer.wait()
    copy = shutil.copytree(tmp_path / "checkpoints" / "step_000001", tmp_path / "checkpoints" / name)
    for step in (2, 3):
        write_step(writer, step)
    writer.wait()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000003"]
    assert (copy / "state.json").is_file()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 0}'])
def test_an_older_checkpoint_that_is_damaged_does_not_end_a_run(tmp_path: Path, content: str) -> None:
    writer = writer_of(tmp_path)
    write_step(writer, 1)
    writer.wait()
    (tmp_path / "checkpoints" / "step_000001" / "state.json").write_text(content)
    for step in (2, 3):
        write_step(writer, step)
    writer.wait()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000001", "step_000003"]
    with pytest.raises(CheckpointError):
        read_state(tmp_path / "checkpoints" / "step_000001")


def test_no_error_of_the_background_is_lost(tmp_path: Path) -> None:
    def wrong(folder: Path) -> None:
        raise KeyError("a bug")

    writer = writer_of(tmp_path)
    write_step(writer, 1, save=wrong)
    with pytest.raises(KeyError, match="a bug"):
        writer.wait()
