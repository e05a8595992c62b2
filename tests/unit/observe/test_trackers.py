from __future__ import annotations

import importlib.util
import math
import struct
import sys
from pathlib import Path

import pytest

from tandem.config.tracking import TrackingConfig
from tandem.errors import ConfigError
from tandem.observe.trackers import MAX_WAITING_BYTES, Tracker, check_trackers, start_trackers


def event_values(folder: Path) -> dict[str, dict[int, float]]:
    """What tensorboard's own reader finds: name -> step -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def as_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def test_tensorboard_gets_the_metrics_under_verls_names(tmp_path: Path) -> None:
    warnings: list[str] = []
    config = TrackingConfig(to=("tensorboard",), names="verl")
    trackers = start_trackers(config, folder=tmp_path, run_config={"seed": 0}, warn=warnings.append)
    for step in (1, 2):
        trackers.log(step, {"policy/loss": step / 10, "policy/ratio_max": 1.5, "policy/kl": math.nan})
    trackers.close()
    assert warnings == []
    assert event_values(tmp_path / "tensorboard") == {
        "actor/pg_loss": {1: as_float32(0.1), 2: as_float32(0.2)},
        "policy/ratio_max": {1: 1.5, 2: 1.5},
    }


def test_tensorboard_forgets_what_lies_after_the_checkpoint_of_a_resumed_run(tmp_path: Path) -> None:
    config = TrackingConfig(to=("tensorboard",))
    for resume_from, steps in ((0, (1, 2, 3)), (1, (2,))):
        trackers = start_trackers(config, folder=tmp_path, run_config={}, warn=pytest.fail)
        if resume_from:
            trackers.go_on_after(resume_from)
        for step in steps:
            trackers.log(step, {"policy/loss": float(step + 10 * resume_from)})
        trackers.close()
    assert event_values(tmp_path / "tensorboard") == {"policy/loss": {1: 1.0, 2: 12.0}}


def test_missing_packages_are_told_at_the_start_all_at_once() -> None:
    missing = [name for name in ("wandb", "trackio") if importlib.util.find_spec(name) is None]
    if not missing:
        pytest.skip("wandb and trackio are installed here")
    config = TrackingConfig(to=("tensorboard", "wandb", "trackio"))
    with pytest.raises(ConfigError) as error:
        check_trackers(config)
    assert [problem.key for problem in error.value.problems] == ["tracking.to"] * len(missing)
    for name in missing:
        assert f"{name} is not installed" in str(error.value)
        assert f"pip install {name}" in str(error.value)


def test_a_folder_that_a_tracker_left_behind_does_not_pass_for_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed here")
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        check_trackers(TrackingConfig(to=("wandb",)))


def test_fault_42_a_tracker_that_cannot_write_is_warned_of_once_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    warnings: list[str] = []
    trackers = start_trackers(TrackingConfig(to=("tensorboard",)), folder=tmp_path, run_config={}, warn=warnings.append)
    trackers._trackers[0].process.wait()
    for step in range(1, 4):
        trackers.log(step, {"policy/loss": 0.0})
    trackers.close()
    assert len(warnings) == 1
    assert "tensorboard gets no more metrics" in warnings[0]
    assert "File exists" in warnings[0] or "exists" in warnings[0]


def test_fault_42_a_tracker_that_cannot_be_started_is_warned_of_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "tensorboard.log").mkdir()
    warnings: list[str] = []
    trackers = start_trackers(TrackingConfig(to=("tensorboard",)), folder=tmp_path, run_config={}, warn=warnings.append)
    trackers.log(1, {"policy/loss": 0.0})
    trackers.close()
    assert len(warnings) == 1
    assert "tensorboard gets no metrics, it cannot be started" in warnings[0]


def start(code: str, tmp_path: Path, warnings: list[str]) -> Tracker:
    return Tracker("mine", [sys.executable, "-c", code], log=tmp_path / "mine.log", warn=warnings.append)


def test_fault_42_a_tracker_that_refuses_a_name(tmp_path: Path) -> None:
    warnings: list[str] = []
    tracker = start("input(); raise ValueError('the name eval/pass@1 is not allowed')", tmp_path, warnings)
    tracker.send({"step": 1, "metrics": {"eval/pass@1": 0.5}})
    tracker.process.wait()
    tracker.send({"step": 2, "metrics": {"eval/pass@1": 0.5}})
    tracker.send({"step": 3, "metrics": {"eval/pass@1": 0.5}})
    tracker.close()
    assert len(warnings) == 1
    assert "ValueError: the name eval/pass@1 is not allowed" in warnings[0]


def test_fault_42_a_tracker_that_dies_at_the_end(tmp_path: Path) -> None:
    warnings: list[str] = []
    tracker = start("import sys, os; sys.stdin.read(); os._exit(3)", tmp_path, warnings)
    tracker.send({"step": 1})
    tracker.close()
    assert len(warnings) == 1
    assert "exit code 3" in warnings[0]


def test_fault_42_a_tracker_that_hangs_neither_blocks_a_step_nor_the_end(tmp_path: Path) -> None:
    warnings: list[str] = []
    tracker = start("import time; time.sleep(1000)", tmp_path, warnings)
    message = {"step": 1, "metrics": {"x" * 1000: 1.0}}
    for _ in range(2 * MAX_WAITING_BYTES // 1000):
        tracker.send(message)
    assert warnings == [warning for warning in warnings if "does not keep up" in warning]
    assert len(warnings) == 1
    assert tracker.process.poll() is not None
    tracker.close()
    assert len(warnings) == 1


def test_fault_42_a_tracker_that_hangs_with_little_to_read_is_ended_at_the_end(tmp_path: Path) -> None:
    warnings: list[str] = []
    tracker = start("import time; time.sleep(1000)", tmp_path, warnings)
    tracker.send({"step": 1})
    tracker.close(timeout_s=0.1)
    assert len(warnings) == 1
    assert "did not finish" in warnings[0]
    assert tracker.process.poll() is not None


def test_a_slow_tracker_gets_all_that_did_not_fit_into_the_pipe(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.stdin.readline(); open(r'{}', 'w').write(str(1 + sum(1 for _ in sys.stdin)))"
    ).format(tmp_path / "count")
    warnings: list[str] = []
    tracker = start(code, tmp_path, warnings)
    for _ in range(300):
        tracker.send({"step": 1, "metrics": {"x" * 1000: 1.0}})
    tracker.close()
    assert warnings == []
    assert (tmp_path / "count").read_text() == "300"
