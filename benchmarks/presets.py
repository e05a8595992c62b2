"""Trains every preset on two-digit addition with about the same number of responses, and draws their learning curves.

    python -m benchmarks.presets train runs/presets                       all, and what spoils them, one by one
    python -m benchmarks.presets train runs/presets dapo ppo              these
    python -m benchmarks.presets draw runs/presets docs/images/presets.png      needs matplotlib; prints the table, too

The task, its model and its warm start are those of `examples/addition.yaml`. A preset keeps what makes the algorithm:
advantage, loss, aggregation, clip range, KL, size of a group, optimizer. Scaled to the task are lengths, the size of a
step (768 responses for all), and with it the mini-batches, so that there are as many updates per step as in the paper
(`notes`: 32, not 256); and learning rates, each the best of those tried between 1e-4 and 3e-3.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

import tandem as td
from tandem.config.checks import updates_per_step
from tandem.config.display import show
from tandem.config.presets import PRESETS
from tandem.observe.curve import read_metrics
from tandem.sft import warm_start

EXAMPLE = Path(__file__).parents[1] / "examples" / "addition.yaml"
TASK = EXAMPLE.with_suffix(".py")
RESPONSES_PER_STEP = 768
RESPONSES = 50 * RESPONSES_PER_STEP
STEPS_AT_A_TIME = 10  # then it is known how many responses were drawn, and whether to go on
OFTEN: Mapping[str, Any] = {"evaluation.every": 5}  # where a step draws more than once
BLUE = "#0072b2"

# By preset: mini-batch, learning rate, and what else the paper gives in its own scale.
SCALED: Mapping[str, Mapping[str, Any]] = {
    "notes": {"trainer.mini_batch_responses": 96, "trainer.lr": 1e-4},
    "grpo": {"trainer.lr": 1e-3},
    "dr_grpo": {"trainer.lr": 1e-3},
    "dapo": {"trainer.mini_batch_responses": 48, "trainer.lr": 1e-4, "reward.overlong_buffer": 1, **OFTEN},
    "gspo": {"trainer.mini_batch_responses": 192, "trainer.lr": 3e-4},
    "cispo": {"trainer.mini_batch_responses": 48, "trainer.lr": 1e-4, **OFTEN},
    "rloo": {"trainer.mini_batch_responses": 384, "trainer.lr": 1e-3},
    "reinforce_pp": {"trainer.lr": 1e-3},
    "ppo": {"trainer.lr": 1e-3, "critic.lr": 5e-3},  # 5 times the policy's
}

# What spoils a run, most of them beside the setting that does not: a preset and what is changed in it.
TRIED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "lr_1e-2": ("dr_grpo", {"trainer.lr": 1e-2}),
    "lr_1e-3_32_updates": ("notes", {"trainer.lr": 1e-3}),
    "no_clip": ("notes", {"trainer.lr": 3e-4, "algorithm.clip_low": 1.0, "algorithm.clip_high": 1000.0}),
    "clip": ("notes", {"trainer.lr": 3e-4}),  # the same with a clip range
    "gspo_lr_3e-3": ("gspo", {"trainer.lr": 3e-3}),
    "grpo_lr_3e-3": ("grpo", {"trainer.lr": 3e-3}),
    "rloo_lr_3e-3": ("rloo", {"trainer.lr": 3e-3}),
    "weights_up_to_5": ("cispo", {"trainer.lr": 3e-4}),
    "k1_in_loss": ("notes", {"algorithm.kl_coef": 0.3, "algorithm.kl_estimator": "k1"}),
    "k1_in_loss_1_update": ("grpo", {"algorithm.kl_coef": 0.3, "algorithm.kl_estimator": "k1"}),
    "k3_in_loss": ("notes", {"algorithm.kl_coef": 0.3, "algorithm.kl_estimator": "k3"}),  # the same with k3
}


class Curve(NamedTuple):
    """Held-out accuracy over the course of a run."""

    responses: tuple[int, ...]
    accuracy: tuple[float, ...]
    stderr: tuple[float, ...]

    @property
    def thousands(self) -> list[float]:
        """Responses in thousands, for the axis."""
        return [count / 1000 for count in self.responses]

    @property
    def band(self) -> tuple[list[float], list[float]]:
        """Two standard errors below and above."""
        pairs = list(zip(self.accuracy, self.stderr, strict=True))
        return [value - 2 * error for value, error in pairs], [value + 2 * error for value, error in pairs]


def main() -> None:
    """Read the arguments; train or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["train", "draw"])
    parser.add_argument("folder", type=Path, help="of all runs")
    parser.add_argument("rest", nargs="*", help="presets to train; or the picture to draw")
    args = parser.parse_args()
    if args.task == "draw":
        curves = {name: read_curve(args.folder / name) for name in SCALED}
        draw(curves, Path(args.rest[0]))
        print(table(curves))
        for run in (args.folder / name for name in TRIED if (args.folder / name).exists()):
            print(run.name, *(f"{value:.2f}" for value in read_curve(run).accuracy))
        return
    for name in args.rest or [*SCALED, *TRIED]:
        preset, overrides = TRIED.get(name, (name, {}))
        train(args.folder / name, preset, _warm_model(args.folder), overrides)


def train(run: Path, preset: str, model: Path, overrides: Mapping[str, Any]) -> None:
    """Train until the number of responses is drawn that all get; a run that is there goes on."""
    steps = 0
    while num_responses(run) < RESPONSES:
        steps += STEPS_AT_A_TIME
        td.train(config_of(preset, model, {**overrides, "run.folder": str(run), "run.steps": steps}))


def num_responses(run: Path) -> int:
    """Responses that a run has drawn, those of resampled groups included."""
    return _drawn(read_metrics(run))[-1] if (run / "metrics.jsonl").exists() else 0


def read_curve(run: Path) -> Curve:
    """Held-out accuracy over the responses drawn, up to the first result after the number that all get."""
    rows = read_metrics(run)
    points = [
        (drawn, row["eval/pass@1"], row["eval/pass@1_stderr"])
        for drawn, row in zip(_drawn(rows), rows, strict=True)
        if row.get("eval/pass@1") is not None
    ]
    within = sum(drawn < RESPONSES for drawn, _, _ in points)
    return Curve(*zip(*points[: within + 1], strict=True))


def config_of(name: str, model: Path, overrides: Mapping[str, Any]) -> td.Config:
    """The preset's config, scaled to the task."""
    group = PRESETS[name].settings.get("rollout.n", 8)
    settings = {
        "model.path": str(model),
        "data.train": f"{TASK}:train",
        "data.prompts_per_step": RESPONSES_PER_STEP // group,
        "data.max_prompt_length": 8,
        "rollout.max_response_length": 8,
        "rollout.max_concurrent": RESPONSES_PER_STEP,
        "reward.function": f"{TASK}:compute_score",
        "algorithm.preset": name,
        "trainer.lr_schedule": "constant",
        "trainer.warmup_steps": 5,
        "evaluation.data": f"{TASK}:heldout",
        "evaluation.every": STEPS_AT_A_TIME,
        "checkpoint.every": 0,
        "checkpoint.keep": 1,
        "checkpoint.keep_best": 0,
        "tracking.rollouts_every": 0,
        "cluster.threads": 1,
        **SCALED[name],
        **overrides,
    }
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, option = key.partition(".")
        sections.setdefault(section, {})[option] = value
    return td.config_from_dict(sections)


def draw(curves: Mapping[str, Curve], picture: Path) -> None:
    """One panel for each preset, with the others behind it in grey."""
    figure = Figure(figsize=(9, 7), dpi=150, layout="constrained")
    panels = figure.subplots(3, 3, sharex=True, sharey=True).flat
    for panel, (name, curve) in zip(panels, curves.items(), strict=True):
        for other in curves.values():
            panel.plot(other.thousands, other.accuracy, color="#d0d0d0", linewidth=0.9)
        panel.fill_between(curve.thousands, *curve.band, color=BLUE, alpha=0.18, linewidth=0)
        panel.plot(curve.thousands, curve.accuracy, color=BLUE, linewidth=1.8)
        panel.set_title(name, loc="left", fontsize=10)
        panel.annotate(
            f"{curve.accuracy[-1]:.2f}",
            (curve.thousands[-1], curve.accuracy[-1]),
            xytext=(-2, -14),
            textcoords="offset points",
            ha="right",
            color=BLUE,
            fontsize=9,
        )
        panel.set_ylim(0.4, 1.01)
        panel.set_xlim(left=0)
        panel.grid(color="#e6e6e6", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("responses drawn, in thousands", fontsize=10)
    figure.supylabel("held-out accuracy, sampled at temperature 1", fontsize=10)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def table(curves: Mapping[str, Curve]) -> str:
    """The same in numbers, as Markdown."""
    lines = [
        "| Preset | Prompts x responses | Updates per step | Learning rate | Responses | Accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for name, curve in curves.items():
        config = config_of(name, Path("warm"), {})
        end = f"{curve.accuracy[-1]:.3f} ± {curve.stderr[-1]:.3f}"
        step = f"{config.data.prompts_per_step} x {config.rollout.n}"
        cells = [f"`{name}`", step, str(updates_per_step(config)), show(config.trainer.lr)]
        lines.append("| " + " | ".join([*cells, f"{curve.responses[-1]:,}", end]) + " |")
    return "\n".join(lines)


def _drawn(rows: Sequence[Mapping[str, float | None]]) -> list[int]:
    """Responses drawn up to each row of the metrics; the first is of before the first step."""
    batches = (0 if row["step"] == 0 else int(row.get("rollout/batches") or 1) for row in rows)
    return [count * RESPONSES_PER_STEP for count in itertools.accumulate(batches)]


def _warm_model(folder: Path) -> Path:
    """The model that all start from, made once."""
    model = folder / "warm"
    if not model.exists():
        example = td.load_config(EXAMPLE)
        sections = {"model": example.model.model_dump(), "cluster": {"threads": 1}}
        with td.start(config=sections) as workers:
            warm_start(workers, example.sft, example.data)
            workers.export(model)
    return model


if __name__ == "__main__":
    main()
