"""FAULTS 41: a full disk, a folder that cannot be written, two processes in one folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import config_from_dict, train
from tandem.checkpoint import complete_checkpoints, read_state
from tandem.errors import CheckpointError
from tandem.export import export
from tandem.observe.folder import lock
from tests.loop.small_run import differences, metrics_of, small_config, traces_of

SIZE_KB = 1024
SEVEN = {"run": {"steps": 7}, "checkpoint": {"every": 2}}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"size={SIZE_KB}k"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, leave_bytes: int) -> Path:
    """A file that leaves so much room."""
    free = os.statvfs(disk)
    blocker = disk / "blocker"
    blocker.write_bytes(b"x" * max(0, free.f_bavail * free.f_bsize - leave_bytes))
    return blocker


def run_on(disk: Path, files: Path, steps: int) -> Path:
    files.mkdir(exist_ok=True)
    return train(config_from_dict(small_config(files, {**SEVEN, "run": {"steps": steps, "folder": str(disk / "run")}})))


@pytest.mark.parametrize("leave_bytes", [0, 8 << 10, 20 << 10, 44 << 10])
def test_fault_41_a_full_disk_is_told_loses_nothing_and_with_room_the_run_goes_on(
    tmp_path: Path, small_disk: Path, leave_bytes: int
) -> None:
    run = run_on(small_disk, tmp_path / "files", 2)
    before = complete_checkpoints(run)
    blocker = fill(small_disk, leave_bytes)
    with pytest.raises(CheckpointError) as caught:
        run_on(small_disk, tmp_path / "files", 7)
    assert "No space left on device" in str(caught.value)
    assert str(run) in str(caught.value)
    assert "->" in str(caught.value)
    assert set(before) <= set(complete_checkpoints(run))
    assert all(read_state(path)["step"] for path in complete_checkpoints(run))
    blocker.unlink()
    run_on(small_disk, tmp_path / "files", 7)
    whole = run_on(tmp_path, tmp_path / "files", 7)
    assert metrics_of(run) == metrics_of(whole)
    assert differences(traces_of(run), traces_of(whole)) == []


def test_a_disk_that_is_full_before_the_first_step(tmp_path: Path, small_disk: Path) -> None:
    fill(small_disk, 0)
    with pytest.raises(CheckpointError, match=r"No space left on device"):
        run_on(small_disk, tmp_path / "files", 2)


def test_an_export_to_a_full_disk_leaves_nothing_behind(tmp_path: Path, small_disk: Path) -> None:
    run = run_on(tmp_path, tmp_path / "files", 2)
    fill(small_disk, 4096)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*No space left on device"):
        export(run, small_disk / "model")
    assert [path.name for path in small_disk.iterdir()] == ["blocker"]


def test_fault_41_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/run.*\n  -> "):
        run_on(tmp_path / "file", tmp_path / "files", 2)


def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    run = run_on(tmp_path, tmp_path / "files", 2)
    before = traces_of(run)
    with lock(run), pytest.raises(CheckpointError, match=rf"another process \(process {os.getpid()}\) is training in"):
        run_on(tmp_path, tmp_path / "files", 4)
    assert differences(traces_of(run), before) == []
