from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.config import Config, config_from_dict, load_config
from tandem.errors import CheckpointError, ConfigError
from tandem.observe.folder import HEADER, RunFolder, write_atomically


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    sections["run"] = {"folder": str(folder), **sections.get("run", {})}
    return config_from_dict({"model": {"path": "tiny"}, **sections}, need_data=False, need_reward=False)


def train_a_step(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1}\n')


def test_a_new_folder_gets_the_resolved_config(tmp_path: Path) -> None:
    config = config_of(tmp_path / "a" / "run", rollout={"n": 4})
    folder = RunFolder(config)
    folder.close()
    assert folder.changed is None
    assert load_config(folder.config_file, need_data=False, need_reward=False) == config
    assert folder.config_file.read_text().startswith(HEADER)


def test_the_same_config_goes_on(tmp_path: Path) -> None:
    RunFolder(config_of(tmp_path)).close()
    train_a_step(tmp_path)
    folder = RunFolder(config_of(tmp_path))
    folder.close()
    assert not folder.changed
    assert not (tmp_path / "changes.jsonl").exists()


def test_fault_41_a_run_folder_that_belongs_to_another_config(tmp_path: Path) -> None:
    RunFolder(config_of(tmp_path)).close()
    train_a_step(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(CheckpointError) as error:
        RunFolder(config_of(tmp_path, rollout={"n": 4}, trainer={"lr": 1e-3}, checkpoint={"every": 5}))
    assert "rollout.n: 8 -> 4" in str(error.value)
    assert "trainer.lr: 1e-6 -> 0.001" in str(error.value)
    assert "checkpoint.every" not in str(error.value), "that one may change"
    assert "run.allow_changes=true" in str(error.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    RunFolder(config_of(tmp_path)).close()


def test_allowed_changes_are_made_and_logged(tmp_path: Path) -> None:
    RunFolder(config_of(tmp_path)).close()
    train_a_step(tmp_path)
    folder = RunFolder(config_of(tmp_path, run={"allow_changes": True}, rollout={"n": 4}, checkpoint={"every": 5}))
    assert load_config(folder.config_file, need_data=False, need_reward=False).rollout.n == 8, "not yet"
    assert not (tmp_path / "changes.jsonl").exists()
    folder.keep_config()
    folder.close()
    assert folder.changed
    assert [change.key for change in folder.changed.guarded] == ["rollout.n"]
    logged = json.loads((tmp_path / "changes.jsonl").read_text())
    assert set(logged["changes"]) >= {"rollout.n: 8 -> 4", "checkpoint.every: 20 -> 5"}
    assert load_config(folder.config_file, need_data=False, need_reward=False).rollout.n == 4


def test_free_changes_need_no_permission(tmp_path: Path) -> None:
    RunFolder(config_of(tmp_path)).close()
    train_a_step(tmp_path)
    folder = RunFolder(config_of(tmp_path, run={"steps": 7}, checkpoint={"every": 3}))
    folder.keep_config()
    folder.close()
    assert load_config(tmp_path / "config.yaml", need_data=False, need_reward=False).run.steps == 7


def test_a_run_that_never_made_a_step_protects_nothing(tmp_path: Path) -> None:
    RunFolder(config_of(tmp_path)).close()
    folder = RunFolder(config_of(tmp_path, rollout={"n": 4}))
    folder.close()
    assert folder.changed is None
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="another config"):
        RunFolder(config_of(tmp_path))


def test_a_config_that_no_run_wrote_is_not_overwritten(tmp_path: Path) -> None:
    own = tmp_path / "config.yaml"
    own.write_text("rollout: {n: 4}  # my notes\n")
    with pytest.raises(CheckpointError, match="was not written by a run"):
        RunFolder(config_of(tmp_path))
    assert own.read_text() == "rollout: {n: 4}  # my notes\n"


def test_metrics_without_a_config_are_not_cut(tmp_path: Path) -> None:
    train_a_step(tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.yaml"):
        RunFolder(config_of(tmp_path))


def test_a_broken_config_in_the_folder(tmp_path: Path) -> None:
    RunFolder(config_of(tmp_path)).close()
    train_a_step(tmp_path)
    (tmp_path / "config.yaml").write_text(HEADER + "rollout: {m: 4}\n")
    with pytest.raises(CheckpointError, match=r"cannot be resumed(.|\n)*rollout\.m"):
        RunFolder(config_of(tmp_path))


def test_fault_41_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*Not a directory"):
        RunFolder(config_of(tmp_path / "file" / "run"))


def test_no_folder_at_all() -> None:
    with pytest.raises(ConfigError, match=r"run\.folder"):
        RunFolder(config_from_dict({"model": {"path": "tiny"}}, need_data=False, need_reward=False))


def test_one_process_per_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tandem.observe.folder import lock; file = lock(Path(sys.argv[1])); "
        "print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"another process \\(process {other.pid}\\) is training in"):
            RunFolder(config_of(tmp_path))
        other.kill()
    RunFolder(config_of(tmp_path)).close()


def test_an_error_gives_the_folder_back(tmp_path: Path) -> None:
    train_a_step(tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.yaml"):
        RunFolder(config_of(tmp_path))
    (tmp_path / "metrics.jsonl").unlink()
    RunFolder(config_of(tmp_path)).close()


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_atomically(path, "old")
    (tmp_path / "config.yaml.new").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
