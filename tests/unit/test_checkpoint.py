"""Which checkpoints are kept, and what a failed write does."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.checkpoint import CheckpointWriter, Snapshot, complete_checkpoints, host_tensors, read_moments, read_state
from tandem.errors import CheckpointError

METRIC = "pass@1"


def save_nothing(weights: Mapping[str, Tensor], folder: Path) -> None:
    folder.mkdir()


def disk_is_full(weights: Mapping[str, Tensor], folder: Path) -> None:
    raise OSError(28, "No space left on device")


def snapshot(step: int, score: float | None = None) -> Snapshot:
    moments = {"exp_avg.w": torch.full((3,), float(step)), "step.w": torch.tensor(float(step))}
    evaluation = {} if score is None else {METRIC: score, "reward": -score}
    return Snapshot(step, {}, moments, state={"note": "mine"}, evaluation=evaluation)


def writer_of(folder: Path, *, keep: int = 1, keep_best: int = 0, background: bool = True) -> CheckpointWriter:
    return CheckpointWriter(folder, keep=keep, keep_best=keep_best, metric=METRIC, background=background)


def kept_of(folder: Path, scores: Sequence[float | None], *, keep: int, keep_best: int) -> list[int]:
    writer = writer_of(folder, keep=keep, keep_best=keep_best)
    for step, score in enumerate(scores, start=1):
        writer.write(snapshot(step, score), save_nothing)
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
    writer.write(snapshot(4), save_nothing)
    assert [int(read_state(path)["step"]) for path in complete_checkpoints(tmp_path)] == [1, 4]


def test_tensors_are_copied_for_the_background_only() -> None:
    """Copies take three times the memory of the weights."""
    weight = torch.zeros(3)
    copied, shared = (host_tensors({"w": weight}, copy=copy)["w"] for copy in (True, False))
    weight.fill_(1.0)
    assert copied.tolist() == [0.0] * 3
    assert shared.tolist() == [1.0] * 3


def test_moments_and_state_come_back(tmp_path: Path) -> None:
    kept_of(tmp_path, [0.5], keep=1, keep_best=0)
    (path,) = complete_checkpoints(tmp_path)
    into = {"exp_avg.w": torch.zeros(3), "step.w": torch.zeros(())}
    read_moments(path, into)
    assert into["exp_avg.w"].tolist() == [1.0, 1.0, 1.0]
    assert into["step.w"] == 1
    assert read_state(path)["note"] == "mine"


@pytest.mark.parametrize("background", [True, False])
def test_fault_41_a_write_that_fails_is_told_and_what_was_there_stays(tmp_path: Path, background: bool) -> None:
    writer = writer_of(tmp_path, background=background)
    writer.write(snapshot(1), save_nothing)
    with pytest.raises(CheckpointError, match=r"No space left on device\n  -> free disk space"):
        write_and_wait(writer)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000001"]
    writer.write(snapshot(3), save_nothing)
    writer.wait()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000003"]


def write_and_wait(writer: CheckpointWriter) -> None:
    writer.write(snapshot(2), disk_is_full)
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
    writer.write(snapshot(1), save_nothing)
    writer.wait()
    copy = shutil.copytree(tmp_path / "checkpoints" / "step_000001", tmp_path / "checkpoints" / name)
    for step in (2, 3):
        writer.write(snapshot(step), save_nothing)
    writer.wait()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000003"]
    assert (copy / "state.json").is_file()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 0}'])
def test_an_older_checkpoint_that_is_damaged_does_not_end_a_run(tmp_path: Path, content: str) -> None:
    writer = writer_of(tmp_path)
    writer.write(snapshot(1), save_nothing)
    writer.wait()
    (tmp_path / "checkpoints" / "step_000001" / "state.json").write_text(content)
    for step in (2, 3):
        writer.write(snapshot(step), save_nothing)
    writer.wait()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000001", "step_000003"]
    with pytest.raises(CheckpointError):
        read_state(tmp_path / "checkpoints" / "step_000001")


def test_no_error_of_the_background_is_lost(tmp_path: Path) -> None:
    def wrong(weights: Mapping[str, Tensor], folder: Path) -> None:
        raise KeyError("a bug")

    writer = writer_of(tmp_path)
    writer.write(snapshot(1), wrong)
    with pytest.raises(KeyError, match="a bug"):
        writer.wait()
