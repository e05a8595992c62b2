"""Learning curves of runs as a picture. Needs matplotlib: pip install matplotlib."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import CheckpointError, TandemError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito: told apart by all eyes
SMOOTHED_OVER = 10  # steps


def draw_curves(runs: Mapping[str, Path], to: Path, *, evaluated: str = "eval/pass@1") -> None:
    """Draw held-out results and training reward over the steps, of one or more runs.

    Args:
        runs: Name of each run in the picture -> its folder, or its `metrics.jsonl`.
        to: The picture; its ending is the format, such as `.png` or `.svg`.
        evaluated: The held-out metric. Where it has a `_stderr`, a band shows twice that.

    Raises:
        CheckpointError: There are no metrics in a folder, or they cannot be read.
        TandemError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise TandemError("drawing needs matplotlib, which is not installed", remedy="pip install matplotlib")
    from matplotlib.figure import Figure  # without pyplot, which would choose a window system for the whole process

    lines = {name: read_metrics(folder) for name, folder in runs.items()}
    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    held_out, training = figure.subplots(1, 2)
    for number, (name, rows) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        _draw_held_out(held_out, name, rows, evaluated, colour)
        _draw_reward(training, name, rows, colour)
    held_out.set_title(f"held-out {evaluated.removeprefix('eval/')}", loc="left", fontsize=10)
    training.set_title(f"training reward, and its mean over {SMOOTHED_OVER} steps", loc="left", fontsize=10)
    for axes in (held_out, training):
        axes.set_xlabel("step")
        axes.set_xlim(left=0)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    held_out.set_ylim(0, 1.02)
    if len(runs) > 1:
        held_out.legend(frameon=False, loc="lower right", fontsize=9)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to)


def read_metrics(run: Path) -> list[dict[str, float | None]]:
    """The lines of a run's `metrics.jsonl`.

    Raises:
        CheckpointError: There is none, it is empty, or it cannot be read.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    remedy = "name the folder of a run that has made at least one step"
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", remedy=remedy) from error
    if not rows:
        raise CheckpointError(f"{path} is empty", remedy=remedy)
    return rows


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and up to `width` - 1 before it."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _draw_held_out(
    axes: Axes, name: str, rows: Sequence[Mapping[str, float | None]], evaluated: str, colour: str
) -> None:
    points = [(row["step"], row[evaluated], row.get(f"{evaluated}_stderr")) for row in rows if evaluated in row]
    known = [(step, value, error or 0.0) for step, value, error in points if step is not None and value is not None]
    steps = [step for step, _, _ in known]
    axes.plot(steps, [value for _, value, _ in known], color=colour, linewidth=2, marker="o", markersize=3, label=name)
    low = [value - 2 * error for _, value, error in known]
    high = [value + 2 * error for _, value, error in known]
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _draw_reward(axes: Axes, name: str, rows: Sequence[Mapping[str, float | None]], colour: str) -> None:
    points = [(row["step"], row.get("reward/mean")) for row in rows]
    known = [(step, value) for step, value in points if step is not None and value is not None]
    steps, values = [step for step, _ in known], [value for _, value in known]
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(steps, moving_mean(values, SMOOTHED_OVER), color=colour, linewidth=2, label=name)
