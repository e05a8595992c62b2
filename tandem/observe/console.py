"""What a run shows: tables at start and end, a line per step above a live bar, warnings.

Without a terminal all of it is plain lines. Text that comes from models and reward functions is shown with its control
characters escaped.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import rich.console
import rich.progress
from rich import box
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from tandem.observe.metrics import formatted
from tandem.observe.output import lasting

SHOWN_IN_FULL = 3  # warnings of one kind, before only each tenth, hundredth, ... of it is shown
NOTABLE_S = 2.0  # a task shorter than this leaves no line behind
PLAIN_EVERY_S = 30.0  # between progress lines of one task where there is no terminal

# metric -> label and width of its cell in the line of a step
CELLS: Mapping[str, tuple[str, int]] = {
    "reward/mean": ("reward", 6),
    "rollout/response_length_mean": ("length", 6),
    "policy/kl": ("kl", 6),
    "policy/ratio_mean": ("ratio", 5),
    "timing_s/step": ("seconds", 5),
}
DROPPED_WHEN_NARROW = ("policy/ratio_mean", "rollout/response_length_mean", "policy/kl", "timing_s/step")
# metric -> label, the value up to which nothing is said, and style of its cell at the end of the line
REMARKS: Mapping[str, tuple[str, float, str]] = {
    "critic/explained_variance": ("explained", -math.inf, ""),
    "rollout/batches": ("batches", 1, ""),
    "reward/invalid": ("invalid", 0, "yellow"),
    "policy/skipped_updates": ("skipped", 0, "yellow"),
}


class _Bar(BarColumn):
    """A bar where there is an end to move to, nothing where there is none."""

    @override
    def render(self, task: rich.progress.Task) -> ProgressBar:
        return ProgressBar(total=0, width=0) if task.total is None else super().render(task)


class Task:
    """Progress of something that takes a while; `total` may be unknown, or be learnt later."""

    def __init__(self, description: str, total: int | None, clock: Callable[[], float]) -> None:
        self.description = description
        self.total = total
        self.completed = 0
        self._clock = clock
        self._start = clock()
        self.on_change: Callable[[], None] = lambda: None

    def advance(self, amount: int = 1) -> None:
        """Say that `amount` more is done."""
        self.update(self.completed + amount)

    def update(self, completed: int, total: int | None = None) -> None:
        """Say how much is done in all."""
        self.completed = completed
        self.total = self.total if total is None else total
        self.on_change()

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return self._clock() - self._start

    @property
    def seconds_left(self) -> float | None:
        """How long it will still take at the pace so far."""
        if self.total is None or self.completed == 0:
            return None
        return self.seconds / self.completed * max(0, self.total - self.completed)

    def __str__(self) -> str:
        count = f" {self.completed}/{self.total}" if self.total is not None else ""
        left = f", {duration(self.seconds_left)} left" if self.seconds_left is not None else ""
        return f"{self.description}{count}, {duration(self.seconds)}{left}"


class Console:
    """Where a run shows itself. `console` is rich's, for tests and notebooks; `clock` counts seconds."""

    def __init__(
        self, console: rich.console.Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = rich.console.Console(file=lasting(sys.stdout), highlight=False) if console is None else console
        self.live = self.console.is_terminal
        self._clock = clock
        self._progress: Progress | None = None
        self._steps: TaskID | None = None  # row of the steps in the live bar
        self._before_steps: TaskID | None = None  # row of what goes on before there are any
        self._phase = ""
        self._in_steps = False
        self._dropped: set[str] = set()  # cells that some line of a step had no room for: then they are in none
        self._warnings: Counter[str] = Counter()
        self._durations: deque[float] = deque(maxlen=20)  # of the last steps, for the time left

    def start(self, title: str, facts: Mapping[str, str]) -> None:
        """Show what is about to run."""
        self._end_phase()
        self._table(title, facts)

    def finish(self, title: str, facts: Mapping[str, str], next_steps: Sequence[str] = ()) -> None:
        """Show how it went, what was warned of, and what to do next: one command or sentence each."""
        self.close()
        warned = ", ".join(f"{kind} ({count})" for kind, count in self._warnings.items())
        self._table(title, {**facts, **({"warnings": warned} if warned else {})})
        if next_steps:
            self._print(Text("What next", style="bold"))
        for line in next_steps:
            self._print(Text(f"  {self._shown(line)}"))

    def note(self, message: str) -> None:
        """Say something that stays readable above the live bar."""
        self._print(Text(self._shown(message)))

    def warn(self, kind: str, message: str, detail: str = "") -> None:
        """Warn, above the live bar. Of one kind the first ones are shown in full, then each tenth, hundredth, ...

        Args:
            kind: What sort of warning it is; they are counted by kind, and the counts are shown at the end.
            message: One line.
            detail: More lines, such as the sample that it is about.
        """
        self._warnings[kind] += 1
        count = self._warnings[kind]
        if count > SHOWN_IN_FULL and 10 ** round(math.log10(count)) != count:
            return
        text = Text(f"warning: {self._shown(message)}", style="yellow")
        if count > SHOWN_IN_FULL:
            text.append(f" (warning {count} of this kind)")
        if detail:
            text.append("\n" + "\n".join(f"    {line}" for line in self._shown(detail).split("\n")), style="dim")
        self._print(text)

    @contextmanager
    def task(self, description: str, total: int | None = None) -> Generator[Task]:
        """Show the progress of something that takes a while, such as loading a model: `task.advance()`."""
        self._end_phase()
        task = Task(description, total, self._clock)
        within_steps = self._in_steps
        if self.live:
            row = self._bars().add_task(description, total=total, count="", left="")
            task.on_change = lambda: self._move(row, task.completed, task.total, task.seconds_left)
        else:
            row = None
            last_line = self._clock()
            if not within_steps:
                self._print(Text(f"{description} ..."))

            def plain_line() -> None:
                nonlocal last_line
                if self._clock() - last_line >= PLAIN_EVERY_S:
                    last_line = self._clock()
                    self._print(Text(str(task)))

            task.on_change = plain_line
        try:
            yield task
            if task.seconds >= NOTABLE_S and not within_steps:
                self._print(Text(f"{description}: done in {duration(task.seconds)}"))
        finally:
            if row is not None and self._progress is not None:
                self._progress.remove_task(row)
                if not self._progress.tasks:
                    self.close()

    def phase(self, name: str) -> None:
        """Show what the run is busy with; empty = nothing in particular.

        Within the steps it stands in the live bar. Before, it is shown until something else is.
        """
        if self._in_steps:
            if self._progress is not None and self._steps is not None:
                self._progress.update(self._steps, description=name)
        elif name and name != self._phase:
            self._end_phase()
            self._phase = name
            if self.live:
                self._before_steps = self._bars().add_task(name, total=None, count="", left="")
            else:
                self._print(Text(f"{name} ..."))

    def begin_steps(self, done: int, total: int) -> None:
        """Start the live bar of the steps, `done` of which were made before."""
        self._end_phase()
        self._in_steps = True
        if self.live:
            self._steps = self._bars().add_task("", total=total, completed=done, count=f"{done}/{total}", left="")

    def step(self, step: int, total: int, metrics: Mapping[str, float], *, evaluated: str = "eval/pass@1") -> None:
        """Show a step's line and move the live bar.

        Args:
            step: Number of the step that has ended.
            total: Number of the last one.
            metrics: The step's metrics; cells of missing ones are left out.
            evaluated: The metric to show where the step was evaluated.
        """
        self._durations.append(metrics.get("timing_s/step", 0.0))
        left = sum(self._durations) / len(self._durations) * (total - step)
        self._print(self._step_line(step, total, metrics, left, evaluated))
        if self._progress is not None and self._steps is not None:
            self._move(self._steps, step, total, left)

    def close(self) -> None:
        """Take the live bar away. What was printed stays."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._steps = self._before_steps = None
        self._in_steps = False
        self._phase = ""

    def _end_phase(self) -> None:
        if self._progress is not None and self._before_steps is not None:
            self._progress.remove_task(self._before_steps)
        self._before_steps = None
        self._phase = ""

    def _step_line(self, step: int, total: int, metrics: Mapping[str, float], left: float, evaluated: str) -> Text:
        """In a terminal in columns, without some of them where it is narrow; else for grep."""
        known = {name: value for name, value in metrics.items() if math.isfinite(value)}
        cells = {
            name: _cell(label, formatted(name, known[name]).rjust(width if self.live else 0))
            for name, (label, width) in CELLS.items()
            if name in known and name not in self._dropped
        }
        cells["left"] = _cell("left", duration(left).rjust(7 if self.live else 0))
        if evaluated in known:
            cells[evaluated] = _cell(evaluated.removeprefix("eval/"), formatted(evaluated, known[evaluated]), "green")
        for name, (label, usual, style) in REMARKS.items():
            if name in known and known[name] > usual:
                cells[name] = _cell(label, formatted(name, known[name]), style)
        if "critic/value_mean" in known and "policy/skipped_updates" not in known:
            cells["warm-up"] = Text("critic alone")
        number = f"{step:>{len(str(total))}}/{total}" if self.live else f"{step}/{total}"
        head, gap = Text.assemble("step ", (number, "bold")), Text("  " if self.live else " ")
        line = gap.join([head, *cells.values()])
        spare = 0 if evaluated in known else len(gap) + len(_cell(evaluated.removeprefix("eval/"), "0.000"))
        for name in DROPPED_WHEN_NARROW:
            if self.live and line.cell_len + spare > self.console.width:
                self._dropped.add(name)
                cells.pop(name, None)
                line = gap.join([head, *cells.values()])
        return line

    def _bars(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.fields[count]}"),
                _Bar(bar_width=30),
                TextColumn("{task.fields[left]}", style="dim"),
                TextColumn("{task.description}"),
                console=self.console,
                transient=True,
            )
            self._progress.start()
        return self._progress

    def _move(self, row: TaskID, completed: int, total: int | None, left: float | None) -> None:
        count = f"{completed}/{total}" if total is not None else f"{completed}"
        text = f"{duration(left)} left" if left is not None else ""
        self._bars().update(row, completed=completed, total=total, count=count, left=text)

    def _table(self, title: str, facts: Mapping[str, str]) -> None:
        if not self.live:
            self._print(Text(title))
            for name, value in facts.items():
                self._print(Text(f"{name}: {self._shown(value)}"))
            return
        table = Table(title=Text(title, style="bold"), title_justify="left", box=box.ROUNDED, show_header=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            table.add_row(Text(name), Text(self._shown(value)))
        self.console.print(table)

    def _shown(self, text: str) -> str:
        """The text as this console can show it."""
        encoding = self.console.encoding
        return printable(text).encode(encoding, "backslashreplace").decode(encoding)

    def _print(self, text: Text) -> None:
        # soft_wrap: long lines stay one line, for grep and for copying paths and commands.
        self.console.print(text, soft_wrap=True)


def _cell(label: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{label} ", style or "dim"), (value, style))


def duration(seconds: float | None) -> str:
    """Seconds as `9.4 s` or `42 s` below a minute, `2:45` below an hour, else `1:02:45`."""
    if seconds is None:
        return ""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def printable(text: str) -> str:
    """The text with everything but line ends escaped that a terminal would obey instead of show."""
    return "".join(char if char == "\n" or char.isprintable() else ascii(char)[1:-1] for char in text)
