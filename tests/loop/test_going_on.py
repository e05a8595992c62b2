"""A run that is taken up again: at an epoch's end, when it is complete, with another config, from a damaged one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem import config_from_dict, train
from tandem.checkpoint import complete_checkpoints
from tandem.errors import CheckpointError, DataError
from tests.loop.small_run import ROWS, differences, metrics_of, small_config, traces_of
from tests.tiny import write_jsonl


def run_to(folder: Path, steps: int, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """Train up to a step, from whatever is there; returns the run's folder."""
    folder.mkdir(exist_ok=True)
    config = small_config(folder, changes)
    config["run"]["steps"] = steps
    return train(config_from_dict(config))


def prompts_of(run: Path, step: int) -> list[str]:
    rows = [json.loads(line) for line in (run / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]
    return [row["prompt"] for row in rows[::4]]


def test_fault_39_resume_at_the_end_of_an_epoch_goes_on_with_the_next_in_its_own_order(tmp_path: Path) -> None:
    epoch = len(ROWS) // 4
    run_to(tmp_path / "stopped", epoch)
    stopped = run_to(tmp_path / "stopped", 2 * epoch)
    whole = run_to(tmp_path / "whole", 2 * epoch)
    assert differences(traces_of(stopped), traces_of(whole)) == []
    first = [prompt for step in range(1, epoch + 1) for prompt in prompts_of(whole, step)]
    second = [prompt for step in range(epoch + 1, 2 * epoch + 1) for prompt in prompts_of(whole, step)]
    assert sorted(first) == sorted(second) == sorted(row["prompt"] for row in ROWS)
    assert first != second


def test_a_complete_run_says_so_and_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_to(tmp_path, 2)
    before = traces_of(run)
    capsys.readouterr()
    run_to(tmp_path, 2)
    assert "has reached step 2 already: nothing is left to train" in capsys.readouterr().out
    assert differences(traces_of(run), before) == []


def test_keys_that_do_not_change_what_is_learnt_may_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_to(tmp_path / "changed", 2)
    capsys.readouterr()
    changed = run_to(tmp_path / "changed", 4, {"checkpoint": {"every": 2, "keep": 3}, "tracking": {"rollouts_max": 7}})
    shown = capsys.readouterr().out
    assert "changed since the run began: checkpoint.keep: 2 -> 3" in shown
    assert "changed since the run began: run.steps: 2 -> 4" in shown
    assert metrics_of(changed) == metrics_of(run_to(tmp_path / "whole", 4))


def test_fault_41_a_run_folder_of_another_config_is_refused_and_untouched(tmp_path: Path) -> None:
    run = run_to(tmp_path, 2)
    before = traces_of(run)
    with pytest.raises(CheckpointError) as caught:
        run_to(tmp_path, 4, {"trainer": {"lr": 5e-3, "warmup_steps": 0}, "rollout": {"n": 2, "max_response_length": 4}})
    message = str(caught.value)
    assert "trainer.lr: 0.01 -> 0.005" in message
    assert "rollout.n: 4 -> 2" in message
    assert "run.allow_changes=true" in message
    assert differences(traces_of(run), before) == []


def test_allowed_changes_take_effect_and_are_written_down(tmp_path: Path) -> None:
    run = run_to(tmp_path, 2)
    changes = {"trainer": {"lr": 5e-3, "warmup_steps": 0}, "run": {"allow_changes": True, "folder": str(run)}}
    run_to(tmp_path, 3, changes)
    assert [line["policy/lr"] for line in metrics_of(run)] == [1e-2, 1e-2, 5e-3]
    noted = json.loads((run / "changes.jsonl").read_text())
    assert "trainer.lr: 0.01 -> 0.005" in noted["changes"]


def test_other_rows_under_the_same_name_are_noticed_and_can_be_allowed(tmp_path: Path) -> None:
    run = run_to(tmp_path, 2)
    recorded = (run / "config.yaml").read_text()
    with pytest.raises(DataError, match=r"not those that this run was started with.*\n.*run.allow_changes=true"):
        run_with_rows(tmp_path, run, allow=False)
    assert (run / "config.yaml").read_text() == recorded, "two steps as before, not three"
    run_with_rows(tmp_path, run, allow=True)
    assert set(prompts_of(run, 3)) == {"9+0=", "9+1=", "9+2=", "9+3="}


def run_with_rows(folder: Path, run: Path, *, allow: bool) -> None:
    config = small_config(folder, {"run": {"steps": 3, "folder": str(run), "allow_changes": allow}})
    write_jsonl(folder / "train.jsonl", [{"prompt": f"9+{right}=", "ground_truth": "9"} for right in range(4)])
    train(config_from_dict(config))


@pytest.mark.parametrize(
    "file",
    ["state.json", "model/model.safetensors", "model/config.json", "model/tokenizer.json", "optimizer/*.safetensors"],
)
def test_fault_38_a_damaged_checkpoint_is_named_and_the_one_before_it_can_be_used(tmp_path: Path, file: str) -> None:
    run = run_to(tmp_path, 3)
    undamaged = metrics_of(run)
    _, newest = complete_checkpoints(run)
    (path,) = newest.glob(file)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError) as caught:
        run_to(tmp_path, 4)
    assert str(newest) in str(caught.value)
    assert "delete this checkpoint folder to use an older one" in str(caught.value)
    shutil.rmtree(newest)
    run_to(tmp_path, 4)
    assert metrics_of(run)[:3] == undamaged


def test_a_kl_term_that_comes_later_needs_a_reference_and_is_told_before_anything_changes(tmp_path: Path) -> None:
    run = run_to(tmp_path, 1)
    first = str(complete_checkpoints(run)[0])
    recorded = (run / "config.yaml").read_text()
    allowed = {"folder": str(run), "allow_changes": True}
    with pytest.raises(CheckpointError, match=r"kl_coef=0.1 needs the model .*\n  -> set algorithm.reference"):
        run_to(tmp_path, 2, {"run": allowed, "algorithm": {"kl_coef": 0.1}})
    assert (run / "config.yaml").read_text() == recorded
    run_to(tmp_path, 2, {"run": allowed, "algorithm": {"kl_coef": 0.1, "reference": first}})
    assert metrics_of(run)[1]["policy/kl"] == 0.0, "the reference is the policy itself"


@pytest.mark.parametrize("key", ["model.path", "algorithm.reference"])
@pytest.mark.parametrize("where", ["run", "checkpoint"])
def test_a_reference_that_is_a_run_stays_what_it_was_when_that_run_goes_on(
    tmp_path: Path, key: str, where: str
) -> None:
    other = run_to(tmp_path / "other", 1)
    first = complete_checkpoints(other)[0]
    path = str(other if where == "run" else first)
    model = {"path": path, "new": None, "tokenizer": None} if key == "model.path" else small_config(tmp_path)["model"]
    algorithm = {"kl_coef": 0.1, "reference": None if key == "model.path" else path}
    changes = {"model": model, "algorithm": algorithm}
    whole = run_to(tmp_path / "whole", 2, changes)
    stopped = run_to(tmp_path / "stopped", 1, changes)
    run_to(tmp_path / "other", 4)
    assert not first.exists()
    if where == "checkpoint" and key == "model.path":
        shutil.copytree(complete_checkpoints(other)[0], first)  # else the model is missed at once
    run_to(tmp_path / "stopped", 2, changes)
    assert metrics_of(whole) == metrics_of(stopped)
    assert metrics_of(whole)[-1]["policy/kl"] > 0


def test_moments_of_another_model_are_refused(tmp_path: Path) -> None:
    small = run_to(tmp_path / "small", 1)
    config = small_config(tmp_path / "small")
    wide = {"new": {**config["model"]["new"], "intermediate_size": 32}}
    large = run_to(tmp_path / "large", 1, {"model": {**config["model"], **wide}})
    (newest,) = complete_checkpoints(small)
    (other,) = complete_checkpoints(large)
    shutil.rmtree(newest / "optimizer")
    shutil.copytree(other / "optimizer", newest / "optimizer")
    with pytest.raises(CheckpointError, match="belongs to another model, or is damaged"):
        run_to(tmp_path / "small", 2)
