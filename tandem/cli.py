"""The command line: one caller of the library. Each command imports what it needs, so that `--help` is quick."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.errors import TandemError

if TYPE_CHECKING:
    from tandem.config.schema import Config
    from tandem.observe.stop import Stop

app = typer.Typer(
    name="tandem",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
ConfigFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run's config.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options that go before the file's: rollout.n=16")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {version('tandem-rl')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models. Start with: tandem train examples/addition.yaml"""


@app.command()
def train(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Train a policy; on a run folder that holds a checkpoint, go on from it.

    Ctrl-C, SIGTERM, a closed terminal: finish the step, save, exit with 0; the same command goes on.

    A second Ctrl-C or SIGTERM: leave at once.
    """
    from tandem.observe.console import Console

    loaded = _load(config_file, overrides)
    with _stop_on_signals() as stop:
        with Console().task("starting"):  # importing PyTorch and transformers takes seconds
            from tandem.hybrid.start import resolve_here
            from tandem.train import train as run_training

        _quiet_libraries()
        run_training(resolve_here(loaded, name=config_file.stem), stop=stop)


@app.command()
def evaluate(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Sample and score the held-out prompts, as the run did: the newest checkpoint, or model.path where there is none.

    A model.path=... of the command line is evaluated in any case.
    """
    from tandem.observe.console import Console

    loaded = _load(config_file, overrides)
    if loaded.evaluation.data is None:
        raise TandemError("there is nothing to evaluate on", remedy="set evaluation.data to a file of held-out prompts")
    console = Console()
    with console.task("starting"):
        from tandem.checkpoint import find_checkpoint, read_state
        from tandem.evaluate import evaluate as run_evaluation
        from tandem.hybrid.start import resolve_here, start_workers
        from tandem.observe.run import evaluation_text
        from tandem.prepare import prepare
        from tandem.rewards.pool import start_rewards

    _quiet_libraries()
    plan = prepare(resolve_here(loaded, name=config_file.stem))
    path = plan.config.model.path
    chosen = path if any(override.startswith("model.path=") for override in overrides or []) else None
    checkpoint = find_checkpoint(Path(chosen or str(plan.config.run.folder)))
    model = checkpoint or path or "a new model with random weights"
    step = 0 if checkpoint is None else int(read_state(checkpoint)["step"])  # its noise gives its numbers
    with (
        console.task(f"evaluating {model}"),
        start_workers(plan.config, resume=chosen is None) as workers,
        start_rewards(plan.config.reward) as reward_fn,
    ):
        seed = plan.config.run.seed
        evaluation = run_evaluation(workers, reward_fn, plan.held_out, plan.config.evaluation, step=step, seed=seed)
    names = [name for name in evaluation.metrics if not name.endswith("_stderr")]
    metrics = {name: evaluation_text(evaluation.metrics, name) for name in names}
    console.finish("Evaluation", {"model": str(model), **metrics, "without a reward": str(evaluation.num_invalid)})


@app.command()
def config(
    section: Annotated[
        str | None, typer.Argument(help="Such as rollout: only its options.", show_default=False)
    ] = None,
) -> None:
    """Print every option with type, default, range and meaning."""
    from tandem.config.reference import render_text
    from tandem.config.schema import SECTIONS

    if section is not None and section not in SECTIONS:
        raise TandemError(f"there is no section {section!r}", remedy=f"the sections are {', '.join(SECTIONS)}")
    typer.echo(render_text([section] if section else SECTIONS).rstrip())


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder or checkpoint.", show_default=False)],
    to: Annotated[Path, typer.Option(help="Folder to write; it must not exist.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapters alone, for peft; without it they are merged.")
    ] = False,
) -> None:
    """Write the policy as a folder that transformers loads."""
    from tandem.export import export as write

    _quiet_libraries()
    folder = write(run, to, dtype=dtype, adapter=adapter)
    if adapter:
        typer.echo(f"{folder}: load it with peft.PeftModel.from_pretrained(base, {str(folder)!r})")
        return
    typer.echo(f"{folder}: load it with AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def _load(config_file: Path, overrides: list[str] | None) -> Config:
    from tandem.config.load import load_config

    return load_config(config_file, overrides or [])


def _quiet_libraries() -> None:
    """transformers' own progress bars would run into Tandem's."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def _stop_on_signals() -> Iterator[Stop]:
    """Ctrl-C, SIGTERM and SIGHUP ask for an end after the step under way; before the first one, or once more, at once.

    Python hands a signal on between two calls: during a long one, such as a backward pass, the answer is seconds late.
    """
    from tandem.observe.output import lasting
    from tandem.observe.stop import Stop

    stop, error = Stop(), lasting(sys.stderr)

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if stop.is_set():
            if number == signal.SIGHUP:  # a closed terminal sends it twice: the shell does, and the kernel
                return
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop.set()
        if not stop.steps_begun:
            error.write(f"\n{name}: leaving; no step has begun, so there is nothing to save\n")
            raise SystemExit(128 + number)
        error.write(f"\n{name}: finishing this step, then saving and leaving. Once more to leave at once.\n")

    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # nohup ignores it
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, *hang_up)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """Run the command line; an error for the user is a message, not a traceback."""
    # Read when torch's thread pool starts. By default its threads spin while they wait for each other, which takes
    # the cores from the reward workers, and from everybody else on a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except TandemError as error:
        sys.stderr.write(f"tandem: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
