"""What a run does to its surroundings over many steps: memory, trackers that fail."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tandem import config_from_dict, grpo_advantages, train
from tests.loop.small_run import metrics_of, small_config

STEPS = 50
SETTLED = 15  # by then allocator pools and caches have their size
TOLERANCE_BYTES = 3 << 20  # measured: 0.5 MiB, and 6.4 MiB where each step's responses are kept


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_fault_43_host_memory_over_50_steps_is_flat(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "run": {"steps": STEPS},
        "data": {"prompts_per_step": 12},
        "rollout": {"n": 12, "max_response_length": 24},
        "checkpoint": {"every": 5},
    }
    seen: list[int] = []

    def advantage(*, rewards: Tensor, valid: Tensor, group_ids: Tensor, **_: object) -> Tensor:
        gc.collect()
        seen.append(resident_bytes())
        return grpo_advantages(rewards, group_ids, valid=valid)

    train(config_from_dict(small_config(tmp_path, changes)), advantage=advantage)
    assert len(seen) == STEPS
    growth = max(seen[-5:]) - max(seen[SETTLED - 5 : SETTLED])
    assert growth < TOLERANCE_BYTES, [size >> 20 for size in seen]


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = train(config_from_dict(small_config(tmp_path, {"tracking": {"to": ["tensorboard"]}})))
    events = [path for path in run.rglob("events.out.tfevents.*") if path.stat().st_size > 500]
    assert events, sorted(run.rglob("*"))


def test_fault_42_a_tracker_that_fails_is_warned_of_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("in the way of its folder")
    run = train(config_from_dict(small_config(tmp_path, {"tracking": {"to": ["tensorboard"]}})))
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3, 4]
    shown = capsys.readouterr().out
    assert "warning: tensorboard" in shown
    assert "Training goes on; metrics.jsonl has all." in shown
