from __future__ import annotations

import io
import math
import subprocess
import sys

import pytest
import rich.console

from tandem.observe.console import Console, duration, printable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(clock: Clock | None = None) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(rich.console.Console(file=file, width=60), clock=clock or Clock()), file


def terminal(width: int = 100) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    made = rich.console.Console(file=file, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    return Console(made), file


METRICS = {
    "reward/mean": 0.4213,
    "rollout/response_length_mean": 12.34,
    "policy/kl": math.nan,
    "policy/ratio_mean": 1.0,
    "timing_s/step": 1.25,
    "eval/pass@1": 0.6125,
    "reward/invalid": 3.0,
    "policy/skipped_updates": 0.0,
}


def test_without_a_terminal_a_step_is_one_line_for_grep() -> None:
    console, file = plain()
    console.begin_steps(11, 150)
    console.step(12, 150, METRICS)
    assert file.getvalue() == (
        "step 12/150 reward 0.421 length 12.3 ratio 1.000 seconds 1.2 left 2:52 pass@1 0.613 invalid 3\n"
    )


def test_kl_is_shown_where_it_was_measured_and_another_metric_where_it_decides() -> None:
    console, file = plain()
    console.step(1, 2, {"policy/kl": 0.0125, "eval/hard/pass@4": 0.5, "eval/pass@1": 0.1}, evaluated="eval/hard/pass@4")
    assert file.getvalue() == "step 1/2 kl 0.0125 left 0.0 s hard/pass@4 0.500\n"


def test_a_critic_and_batches_that_were_drawn_again_are_shown() -> None:
    console, file = plain()
    critic = {"critic/value_mean": 0.25, "critic/explained_variance": 0.5, "policy/skipped_updates": 0.0}
    console.step(2, 3, {"reward/mean": 0.5, **critic, "rollout/batches": 1.0})
    console.step(3, 3, {"reward/mean": 0.5, "rollout/batches": 3.0, "critic/explained_variance": math.nan})
    assert file.getvalue() == (
        "step 2/3 reward 0.500 left 0.0 s explained 0.500\nstep 3/3 reward 0.500 left 0.0 s batches 3\n"
    )


def test_a_step_of_the_critic_s_warm_up_says_so() -> None:
    console, file = plain()
    console.step(1, 2, {"critic/value_mean": 0.25, "policy/skipped_updates": math.nan})
    assert file.getvalue() == "step 1/2 left 0.0 s critic alone\n"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_on_a_terminal_columns_are_aligned_and_lines_fit(width: int) -> None:
    console, file = terminal(width)
    console.begin_steps(0, 150)
    metrics = {name: value for name, value in METRICS.items() if name != "reward/invalid"}
    console.step(9, 150, metrics)
    console.step(10, 150, metrics | {"reward/mean": -0.5, "rollout/response_length_mean": 1024.0})
    console.close()
    rows = [line for line in file.getvalue().replace("\r", "\n").split("\n") if "step" in line and "reward" in line]
    first, second = (row[row.index("step") :].rstrip() for row in rows)
    assert first.index("left") == second.index("left")
    assert len(second) <= width
    assert ("ratio" in first) == (width >= 100)
    assert "pass@1 0.613" in second


@pytest.mark.parametrize("width", [60, 80, 90])
def test_rows_with_and_without_an_evaluation_have_the_same_columns(width: int) -> None:
    console, file = terminal(width)
    console.begin_steps(0, 150)
    evaluated = METRICS | {"reward/invalid": 0.0, "policy/kl": 0.0125}
    plain_row = {name: value for name, value in evaluated.items() if name != "eval/pass@1"}
    for step, metrics in enumerate((plain_row, evaluated, plain_row), start=9):
        console.step(step, 150, metrics)
    console.close()
    rows = [line for line in file.getvalue().replace("\r", "\n").split("\n") if "step" in line and "reward" in line]
    first, second, third = (row[row.index("/150") :].rstrip() for row in rows)
    labels = [[word for word in row.split() if word.isalpha()] for row in (first, second, third)]
    assert labels[0] == labels[1] == labels[2]
    assert first.index("left") == second.index("left") == third.index("left")
    assert "pass@1 0.613" in second
    assert len(second) <= width


def test_the_live_bar_shows_progress_time_left_and_what_goes_on_and_goes_away() -> None:
    console, file = terminal()
    console.begin_steps(0, 10)
    console.phase("rollout")
    console.step(1, 10, {"timing_s/step": 2.0})
    progress = console._progress
    assert progress is not None
    task = progress.tasks[0]
    assert (task.completed, task.total, task.fields["count"], task.fields["left"]) == (1, 10, "1/10", "18 s left")
    assert task.description == "rollout"
    progress.refresh()
    assert "18 s left" in file.getvalue()
    console.close()
    assert console._progress is None


def test_warnings_of_a_kind_are_shown_in_full_thrice_then_ever_more_rarely_and_counted_at_the_end() -> None:
    console, file = plain()
    for step in range(1, 101):
        console.warn("invalid rewards", f"step {step}", f"sample {step}\nsecond line")
    console.warn("skipped updates", "step 7")
    console.finish("Done", {"folder": "runs/a"})
    text = file.getvalue()
    assert "warning: step 1\n    sample 1\n    second line\n" in text
    shown = [line.split()[2] for line in text.splitlines() if line.startswith("warning: step")]
    assert shown == ["1", "2", "3", "10", "100", "7"]
    assert "(warning 100 of this kind)" in text
    assert "warnings: invalid rewards (100), skipped updates (1)" in text


def test_tables_at_start_and_end() -> None:
    for console, file in (plain(), terminal()):
        console.start("Tandem", {"model": "Qwen3, 0.1 M parameters", "folder": "runs/[odd]"})
        console.finish(
            "Done", {"pass@1": "0.41 -> 0.98"}, ["tandem export " + "runs/very_long_name/" * 8 + " --to my-model"]
        )
        for text in ("Qwen3, 0.1 M parameters", "runs/[odd]", "0.41 -> 0.98", "runs/very_long_name/ --to my-model\n"):
            assert text in file.getvalue(), "not cut, not wrapped, not taken for markup"


def test_a_task_without_a_terminal_reports_now_and_then_and_at_its_end() -> None:
    clock = Clock()
    console, file = plain(clock)
    with console.task("warm start", total=100) as task:
        for _ in range(100):
            clock.now += 1.0
            task.advance()
    assert file.getvalue().splitlines() == [
        "warm start ...",
        "warm start 30/100, 30 s, 1:10 left",
        "warm start 60/100, 1:00, 40 s left",
        "warm start 90/100, 1:30, 10 s left",
        "warm start: done in 1:40",
    ]


def test_a_short_task_within_the_steps_leaves_no_lines() -> None:
    clock = Clock()
    for console, file in (plain(clock), terminal()):
        console.begin_steps(0, 3)
        before = file.getvalue()
        with console.task("evaluating", total=2) as task:
            clock.now += 5.0
            task.update(2)
        assert "evaluating:" not in file.getvalue()[len(before) :]
        console.close()


def test_a_task_that_fails_takes_its_bar_away() -> None:
    console, _ = terminal()
    with pytest.raises(ValueError, match="no such model"), console.task("loading"):
        raise ValueError("no such model")
    assert console._progress is None


def test_a_task_within_a_task_leaves_the_outer_ones_bar() -> None:
    console, _ = terminal()
    with console.task("loading", total=2) as outer:
        with console.task("reading", total=1) as inner:
            inner.advance()
        outer.advance()
        assert console._progress is not None
        assert [task.fields["count"] for task in console._progress.tasks] == ["1/2"]
    assert console._progress is None


def test_a_task_may_learn_its_total_later() -> None:
    console, _ = terminal()
    with console.task("tokenising") as task:
        assert task.seconds_left is None
        task.update(5, total=10)
        assert console._progress is not None
        assert console._progress.tasks[0].fields["count"] == "5/10"


def test_what_a_model_wrote_cannot_drive_the_terminal() -> None:
    console, file = plain()
    console.warn("invalid rewards", "a sample", "\x1b[2J\x07 [bold]x[/bold] é 漢\n\ttab")
    assert "    \\x1b[2J\\x07 [bold]x[/bold] é 漢\n    \\ttab\n" in file.getvalue()
    assert printable("a\r\nb") == "a\\r\nb"


def test_a_console_that_cannot_show_a_character_shows_its_number() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", newline="")
    console = Console(rich.console.Console(file=file))
    console.start("Tandem", {"model": "é 漢"})
    console.warn("invalid rewards", "漢", "漢")
    file.seek(0)
    assert file.read() == "Tandem\nmodel: é \\u6f22\nwarning: \\u6f22\n    \\u6f22\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (165, "2:45"),
        (3765, "1:02:45"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_console_is_there_before_torch_is() -> None:
    code = "import sys, tandem.observe.console; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_before_the_steps_each_thing_that_goes_on_is_said_once() -> None:
    console, file = plain()
    for name in ("loading the model", "evaluation", "", "evaluation", ""):
        console.phase(name)
    console.begin_steps(0, 3)
    console.phase("rollout")
    assert file.getvalue().splitlines() == ["loading the model ...", "evaluation ..."]


def test_before_the_steps_the_terminal_shows_what_goes_on_and_takes_it_away() -> None:
    console, file = terminal()
    console.phase("loading the model")
    console.phase("evaluation")
    assert console._progress is not None
    assert [task.description for task in console._progress.tasks] == ["evaluation"]
    console.begin_steps(0, 3)
    assert [task.total for task in console._progress.tasks] == [3]
    console.close()
    assert "evaluation" in file.getvalue()
    assert "━" not in file.getvalue().split("0/3")[0], "no bar where there is no end"
