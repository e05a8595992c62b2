"""Contract 5: a run that is killed at any moment and started again ends like one that was never stopped."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.loop.small_run import differences, metrics_of, run_command, small_config, start_command, traces_of
from tests.loop.small_run import write_config as written
from tests.tiny import write_jsonl

KILLS = 24
STEPS = 24
EVENTFUL: dict[str, Any] = {  # everything that has a position, and saves all the time
    "run": {"steps": STEPS},
    "sft": {"steps": 3, "batch_size": 4, "lr": 1e-2},
    "rollout": {"n": 4, "max_response_length": 4},
    "algorithm": {"kl_coef": 0.1},
    "trainer": {"lr": 1e-2, "warmup_steps": 3, "lr_schedule": "linear", "mini_batch_responses": 8, "update_epochs": 2},
    "evaluation": {"every": 3, "n": 2},
    "checkpoint": {"every": 2, "keep": 2, "keep_best": 1},
}


def eventful_run(folder: Path) -> Path:
    """A config with warm start, reference, schedule, mini-batches, evaluations. Returns the YAML file."""
    folder.mkdir()
    answers = [{"prompt": f"{number}+0=", "ground_truth": str(number)} for number in range(6)]
    held_out = write_jsonl(folder / "held_out.jsonl", answers)
    changes = {name: dict(section) for name, section in EVENTFUL.items()}
    changes["run"]["folder"] = str(folder / "run")
    changes["sft"]["train"] = str(write_jsonl(folder / "warm_start.jsonl", [{**row, "answer": "1"} for row in answers]))
    changes["evaluation"]["data"] = str(held_out)
    return written(folder / "run.yaml", small_config(folder, changes))


def num_lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def moments(run: Path, rng: random.Random) -> list[Callable[[], bool]]:
    """Conditions under which to kill: in a save, in a removal, when a step was logged, at any time at all."""
    begin, lines = time.monotonic(), num_lines(run)
    delay, more = rng.uniform(0.0, 2.0), rng.randint(1, 5)
    return [
        lambda: any((run / "checkpoints").glob("*.partial")) and num_lines(run) >= lines + more,
        lambda: any((run / "checkpoints").glob("*.partial/optimizer")) and num_lines(run) >= lines + more,
        lambda: any((run / "checkpoints").glob("*.deleted")),
        lambda: num_lines(run) >= lines + more,
        lambda: time.monotonic() > begin + delay,
    ]


def kill_when(process: ForkServerProcess, moment: Callable[[], bool]) -> bool:
    """SIGKILL at `moment`; False where the process ends before it comes."""
    while not wait([process.sentinel], timeout=0.0005):
        if moment():
            process.kill()
            process.join()
            return process.exitcode == -9
    return False


@pytest.mark.slow
def test_fault_38_kill_9_at_any_moment_and_start_again_changes_no_bit(tmp_path: Path) -> None:
    never_stopped = eventful_run(tmp_path / "never_stopped")
    log = tmp_path / "log"
    assert run_command(["train", str(never_stopped)], log) == 0, log.read_text()
    expected = traces_of(never_stopped.parent / "run")
    rng = random.Random(0)
    kills = in_saves = number = 0
    while kills < KILLS:
        number += 1
        killed = eventful_run(tmp_path / f"killed_{number}")
        run = killed.parent / "run"
        for attempt in range(KILLS):  # then it may end in peace
            moment = moments(run, rng)[(number + attempt) % 5]
            process = start_command(["train", str(killed)], log)
            if not kill_when(process, moment):
                assert process.exitcode == 0, log.read_text()[-3000:]
                break
            kills += 1
            in_saves += any((run / "checkpoints").glob("*.partial"))
        assert run_command(["train", str(killed)], log) == 0, log.read_text()[-3000:]
        assert differences(traces_of(run), expected) == [], f"after {kills} kills"
    assert in_saves >= 5, "too few of the kills struck a save"
    assert len({line["eval/pass@1"] for line in metrics_of(run) if "eval/pass@1" in line}) > 2, "nothing is learnt"
