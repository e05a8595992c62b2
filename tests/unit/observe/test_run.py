from __future__ import annotations

import gc
import io
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rich.console
import torch

from tandem.batch import Evaluation
from tandem.config import Config, config_from_dict
from tandem.errors import CheckpointError, ConfigError, TrainingError
from tandem.observe.console import Console
from tandem.observe.metrics import METRICS, VOLATILE
from tandem.observe.run import Run
from tandem.observe.stop import Stop
from tests.unit.observe.made import made_rewards, made_rollouts, made_update

ADVANTAGES = torch.tensor([0.5, -0.5, 0.0, 0.0])


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    given = {"model": {"path": "tiny"}, **sections, "run": {"folder": str(folder)}}
    return config_from_dict(given, need_data=False, need_reward=False)


def evaluation(step: int, value: float) -> Evaluation:
    return Evaluation(step=step, metrics={"pass@1": value}, num_prompts=4)


class Clock:
    """Moves on when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def console() -> Console:
    return Console(rich.console.Console(file=io.StringIO(), width=200))


def shown(console: Console) -> str:
    file = console.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def make_step(run: Run, step: int, evaluated: Evaluation | None = None) -> dict[str, float]:
    rewards = made_rewards((1.0, 0.0, float(step), float(step)))
    return run.log(step, made_rollouts(), rewards, ADVANTAGES, made_update(), evaluated)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def stable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(VOLATILE)} for row in rows]


def rollout_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "rollouts").iterdir())


def test_mismatch_stop_ends_the_run_and_below_it_there_is_a_warning(tmp_path: Path, console: Console) -> None:
    """The step is written and saved before the run ends; what was not measured is no mismatch."""

    def step(run: Run, number: int, **measured: float) -> None:
        run.log(number, made_rollouts(), made_rewards(), ADVANTAGES, made_update(metrics=measured))

    every = {"checkpoint": {"every": 0}, "algorithm": {"mismatch_stop": 0.5}}
    with Run(config_of(tmp_path, **every), console=console) as run:
        steps = run.steps(9)
        step(run, next(steps))
        step(run, next(steps), **{"mismatch/kl": 1e-3})
        assert "warning" not in shown(console)
        step(run, next(steps), **{"mismatch/kl": 0.4})
        assert not run.due("checkpoint", 3)
        assert "warning: step 3: the engine samples from another distribution than is trained: mismatch/kl is 0.4" in (
            shown(console)
        )
        step(run, next(steps), **{"mismatch/kl": 0.6})
        assert run.due("checkpoint", 4)
        with pytest.raises(TrainingError, match=r"0\.6, more than algorithm\.mismatch_stop=0\.5\n  -> compute more"):
            next(steps)
    assert [row["mismatch/kl"] for row in lines(tmp_path)] == [None, 1e-3, 0.4, 0.6]


def test_a_line_has_every_key_of_the_table(tmp_path: Path, console: Console) -> None:
    with Run(config_of(tmp_path), console=console) as run:
        for step in run.steps(2):
            make_step(run, step, evaluation(step, 0.5))
    assert [row["step"] for row in lines(tmp_path)] == [1, 2]
    for row in lines(tmp_path):
        assert set(row) == {"step", *METRICS}


def test_times_add_up_and_a_save_counts_in_the_next_line(tmp_path: Path, console: Console) -> None:
    clock = Clock()
    with Run(config_of(tmp_path), console=console, clock=clock) as run:
        clock.now += 100  # loading the model belongs to no step
        for step in run.steps(2):
            for _ in range(2):
                with run.timing("rollout"):
                    clock.now += 1.5
            clock.now += 1.0
            metrics = make_step(run, step)
            assert metrics["perf/tokens_per_s"] == pytest.approx(16 / metrics["timing_s/step"])
            with run.timing("checkpoint"):
                clock.now += 2.0
    first, second = lines(tmp_path)
    assert (first["timing_s/rollout"], first["timing_s/step"], first["timing_s/checkpoint"]) == (3.0, 4.0, 0.0)
    assert (second["timing_s/rollout"], second["timing_s/step"], second["timing_s/checkpoint"]) == (3.0, 6.0, 2.0)


def test_numbers_of_ranks_and_phases_become_one_a_step(tmp_path: Path, console: Console) -> None:
    with Run(config_of(tmp_path), console=console) as run:
        run.record("memory/rollout_gib", 9.0)  # in the evaluation before the first step, which has a line of its own
        for step in run.steps(2):
            if step == 1:
                for peak, moved in ((1.5, 0.25), (2.5, 0.5)):  # two ranks
                    run.record("memory/rollout_gib", peak)
                    run.record("memory/train_gib", None)  # a system that does not tell
                    run.record("perf/reshard_gib", moved)
                run.record("memory/rollout_gib", 2.0)  # a second phase in the step
            make_step(run, step)
    first, second = lines(tmp_path)
    assert (first["memory/rollout_gib"], first["memory/train_gib"], first["perf/reshard_gib"]) == (2.5, None, 0.75)
    assert (second["memory/rollout_gib"], second["perf/reshard_gib"]) == (None, None)


def test_rollouts_have_one_number_per_token(tmp_path: Path, console: Console) -> None:
    rollouts = made_rollouts()
    update = made_update(logprobs=rollouts.rollout_logprobs - 1, ratio=torch.full((4, 3), 1.25))
    with Run(config_of(tmp_path), console=console) as run:
        run.log(1, rollouts, made_rewards((1.0, None, 1.0, 1.0)), ADVANTAGES, update)
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert rows[0] == {
        "step": 1,
        "group": 0,
        "prompt_id": 0,
        "data_source": "sums",
        "prompt": "prompt 0",
        "response": "response 0.0",
        "ground_truth": "0",
        "reward": 1.0,
        "valid": True,
        "problem": None,
        "advantage": 0.5,
        "finish_reason": "length",
        "policy_version": 0,
        "tokens": [10, 11, 12],
        "mask": [1, 1, 1],
        "rollout_logprobs": [-0.5, -1.5, -2.5],
        "logprobs": [-1.5, -2.5, -3.5],
        "ratio": [1.25, 1.25, 1.25],
    }
    assert rows[1]["reward"] is None
    assert rows[1]["problem"] == "the function raised ValueError"
    assert rows[1]["tokens"] == [10]


def test_advantages_may_differ_by_token(tmp_path: Path, console: Console) -> None:
    with Run(config_of(tmp_path), console=console) as run:
        run.log(1, made_rollouts(), made_rewards(), torch.arange(12.0).view(4, 3), made_update())
    first, second, *_ = (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert json.loads(first)["advantage"] == [0.0, 1.0, 2.0]
    assert json.loads(second)["advantage"] == [3.0]


@pytest.mark.parametrize("truth", ["7" * 20_000, ["7" * 10_000, "7" * 9_992]])
def test_a_huge_ground_truth_is_shortened_in_each_line_of_its_group(
    tmp_path: Path, console: Console, truth: object
) -> None:
    made = made_rollouts()
    rollouts = replace(made, prompts=tuple(replace(prompt, ground_truth=truth) for prompt in made.prompts))
    with Run(config_of(tmp_path), console=console) as run:
        run.log(1, rollouts, made_rewards(), ADVANTAGES, made_update())
    written = (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert all(len(line) < 11_000 for line in written)
    assert json.loads(written[0])["ground_truth"].endswith("777 ... (20000 characters)")


@pytest.mark.parametrize(
    ("tracking", "expected"),
    [
        ({"rollouts_every": 2, "rollouts_max": 3}, {"step_000002.jsonl": 3, "step_000004.jsonl": 3}),
        ({"rollouts_every": 0}, {}),
    ],
)
def test_rollouts_every_and_rollouts_max(
    tmp_path: Path, console: Console, tracking: dict[str, Any], expected: dict[str, int]
) -> None:
    with Run(config_of(tmp_path, tracking=tracking), console=console) as run:
        for step in run.steps(4):
            make_step(run, step)
    found = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "rollouts").iterdir()}
    assert found == expected


def test_a_resumed_run_has_the_metrics_of_one_that_was_never_stopped(tmp_path: Path, console: Console) -> None:
    config = {"evaluation": {"data": "held_out.jsonl", "every": 2}}

    def go(
        folder: Path, *, killed_at: int = 0, resume_from: int = 0, state: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        with Run(config_of(folder, **config), console=console) as run:
            if state is not None:
                run.load_state_dict(state)
            if resume_from == 0 and run.due("evaluation", 0):
                run.log_initial(evaluation(0, 0.25))
            saved: dict[str, Any] = {}
            for step in run.steps(6, resume_from=resume_from):
                make_step(run, step, evaluation(step, step / 8) if run.due("evaluation", step) else None)
                if step == 2:
                    saved = json.loads(json.dumps(run.state_dict()))
                if step == killed_at:
                    return saved
            return run.state_dict()

    whole = go(tmp_path / "whole")
    state = go(tmp_path / "cut", killed_at=5)
    (tmp_path / "cut" / "rollouts" / "step_000006.jsonl.new").write_text("torn")
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    assert go(tmp_path / "cut", resume_from=2, state=state) == whole
    assert stable(lines(tmp_path / "cut")) == stable(lines(tmp_path / "whole"))
    assert [row["step"] for row in lines(tmp_path / "cut")] == [0, 1, 2, 3, 4, 5, 6]
    assert rollout_files(tmp_path / "cut") == rollout_files(tmp_path / "whole")


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path: Path, console: Console) -> None:
    for _ in range(2):
        with Run(config_of(tmp_path), console=console) as run:
            run.log_initial(evaluation(0, 0.5))
            for step in run.steps(3):
                make_step(run, step)
                if step == 2:
                    break
    assert [row["step"] for row in lines(tmp_path)] == [0, 1, 2]


def test_evaluations_fall_due_before_and_after_and_every_so_often(tmp_path: Path, console: Console) -> None:
    def due(every: int, data: str | None = "held_out.jsonl") -> list[int]:
        section = {"evaluation": {"data": data, "every": every}} if data else {}
        with Run(config_of(tmp_path, **section), console=console) as run:
            run.steps(7)
            return [step for step in range(8) if run.due("evaluation", step)]

    assert due(3) == [0, 3, 6, 7]
    assert due(0) == [0, 7]
    assert due(3, data=None) == []


def test_checkpoints_fall_due_every_so_often_and_at_the_end(tmp_path: Path, console: Console) -> None:
    def due(every: int) -> list[int]:
        with Run(config_of(tmp_path, checkpoint={"every": every}), console=console) as run:
            run.steps(7)
            return [step for step in range(8) if run.due("checkpoint", step)]

    assert due(3) == [3, 6, 7]
    assert due(0) == [7]


@pytest.mark.parametrize(("keep_best", "expected"), [(1, [2, 4, 6]), (0, [6])])
def test_a_new_best_is_saved(tmp_path: Path, console: Console, keep_best: int, expected: list[int]) -> None:
    values = {2: 0.5, 3: 0.5, 4: 0.6, 5: 0.1}
    sections = {
        "evaluation": {"data": "held_out.jsonl", "every": 1},
        "checkpoint": {"every": 0, "keep_best": keep_best},
    }
    saved = []
    with Run(config_of(tmp_path, **sections), console=console) as run:
        for step in run.steps(6):
            make_step(run, step, evaluation(step, values[step]) if step in values else None)
            if run.due("checkpoint", step):
                saved.append(step)
    assert saved == expected


def test_a_stop_ends_the_run_after_a_checkpoint(tmp_path: Path, console: Console) -> None:
    stop = Stop()
    saved = []
    with Run(config_of(tmp_path), stop=stop, console=console) as run:
        for step in run.steps(9):
            if step == 3:
                stop.set()
            make_step(run, step)
            if run.due("checkpoint", step):
                saved.append(step)
        assert run.ended_by == "stop"
    assert saved == [3]
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]


def test_a_stop_that_comes_after_the_checkpoint_was_not_due_waits_for_that_of_the_next_step(
    tmp_path: Path, console: Console
) -> None:
    stop = Stop()
    saved = []
    with Run(config_of(tmp_path), stop=stop, console=console) as run:
        for step in run.steps(9):
            make_step(run, step)
            if run.due("checkpoint", step):
                saved.append(step)
            if step == 3:
                stop.set()
    assert saved == [4], "or what step 3 has learnt would be lost"


def test_a_stop_before_the_first_step_makes_none(tmp_path: Path, console: Console) -> None:
    stop = Stop()
    stop.set()
    with Run(config_of(tmp_path), stop=stop, console=console) as run:
        assert list(run.steps(9)) == []
        assert run.ended_by == "stop"


def test_patience_ends_the_run_after_a_checkpoint(tmp_path: Path, console: Console) -> None:
    values = {0: 0.3, 1: 0.5, 2: 0.4, 3: 0.5}
    sections = {
        "evaluation": {"data": "held_out.jsonl", "every": 1, "patience": 2},
        "checkpoint": {"keep_best": 0},
    }
    saved = []
    with Run(config_of(tmp_path, **sections), console=console) as run:
        run.log_initial(evaluation(0, values[0]))
        for step in run.steps(9):
            make_step(run, step, evaluation(step, values[step]))
            if run.due("checkpoint", step):
                saved.append(step)
        assert run.ended_by == "patience"
        assert (run.best.step, run.best.value) == (1, 0.5)
        assert (run.best.before, run.best.latest) == ({"pass@1": 0.3}, {"pass@1": 0.5})
    assert saved == [3]


def test_a_run_that_goes_to_its_end_was_ended_by_nothing(tmp_path: Path, console: Console) -> None:
    with Run(config_of(tmp_path), console=console) as run:
        for step in run.steps(2):
            make_step(run, step)
        assert run.ended_by is None


def test_invalid_rewards_and_skipped_updates_are_shown_with_a_sample(tmp_path: Path, console: Console) -> None:
    with Run(config_of(tmp_path), console=console) as run:
        run.log(1, made_rollouts(), made_rewards((1.0, 0.0, None, None)), ADVANTAGES, made_update(num_skipped=2))
    text = shown(console)
    assert "warning: step 1: 2 of 4 responses have no reward" in text
    assert "prompt: prompt 1\n    response: response 1.0\n    ground truth: 1\n" in text
    assert "problem: the function raised ValueError" in text
    assert "warning: step 1: 2 updates skipped, loss or gradient was not finite" in text


def test_evaluations_are_shown_and_what_they_could_not_score(tmp_path: Path, console: Console) -> None:
    with Run(config_of(tmp_path), console=console) as run:
        run.log_initial(Evaluation(step=0, metrics={"pass@1": 0.5, "pass@1_stderr": 0.25}, num_prompts=4))
        evaluated = Evaluation(
            step=1, metrics={"pass@1": 0.75}, num_prompts=4, num_invalid=2, problem="prompt: 1+1=\nproblem: no number"
        )
        make_step(run, 1, evaluated)
    text = shown(console)
    assert "before the first step: pass@1 0.500 ± 0.250\n" in text
    assert "pass@1 0.750\n" in text
    assert "warning: step 1: 2 responses of the evaluation have no reward\n    prompt: 1+1=\n    problem: no" in text


def test_changes_are_shown(tmp_path: Path, console: Console) -> None:
    with Run(config_of(tmp_path), console=console) as run:
        make_step(run, 1)
    with Run(config_of(tmp_path, checkpoint={"every": 3}), console=console):
        pass
    assert "changed since the run began: checkpoint.every: 20 -> 3" in shown(console)


def test_fault_41_disk_full_while_writing_rollouts_leaves_the_run_as_it_was(tmp_path: Path, console: Console) -> None:
    with Run(config_of(tmp_path), console=console) as run:
        make_step(run, 1)
        before = (tmp_path / "metrics.jsonl").read_bytes()
        (tmp_path / "rollouts" / "step_000002.jsonl.new").symlink_to("/dev/full")
        with pytest.raises(CheckpointError, match=r"cannot write .*step_000002\.jsonl: No space left") as error:
            make_step(run, 2)
    assert error.value.remedy is not None
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert rollout_files(tmp_path) == ["step_000001.jsonl"]


def test_fault_41_rollouts_that_cannot_be_cut_are_a_clear_error(tmp_path: Path, console: Console) -> None:
    with Run(config_of(tmp_path), console=console) as run:
        (tmp_path / "rollouts" / "step_000002.jsonl").mkdir()  # which no `unlink` removes
        with pytest.raises(CheckpointError, match=r"cannot write .*step_000002\.jsonl"):
            run.steps(3, resume_from=1)


def test_a_missing_tracker_is_told_before_the_folder_is_touched(tmp_path: Path, console: Console) -> None:
    pytest.importorskip("tensorboard")
    config = config_of(tmp_path / "run", tracking={"to": ["trackio"]})
    with pytest.raises(ConfigError, match="trackio is not installed"), Run(config, console=console):
        pass
    assert not (tmp_path / "run").exists()


@pytest.fixture
def nowhere() -> Iterator[Console]:
    with Path("/dev/null").open("w") as file:
        yield Console(rich.console.Console(file=file))


def test_fault_43_host_memory_over_50_steps_is_flat(tmp_path: Path, nowhere: Console) -> None:
    def allocated() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    sizes = {}
    with Run(config_of(tmp_path), console=nowhere) as run:
        tracemalloc.start()
        try:
            for step in run.steps(80):
                rewards = made_rewards((1.0, None, 0.0, 1.0))
                run.log(step, made_rollouts(), rewards, ADVANTAGES, made_update(num_skipped=1), evaluation(step, 0.5))
                if step in (30, 80):
                    sizes[step] = allocated()
        finally:
            tracemalloc.stop()
    assert sizes[80] - sizes[30] < 50_000, "kept metrics alone would be more than 2 KB a step"
