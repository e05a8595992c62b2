"""A run: its folder, its steps, what falls due in them, and what is written and shown of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from jaxtyping import Float
from torch import Tensor

from tandem.batch import CriticUpdate, Drawn, Evaluation, Rewards, Rollouts, UpdateResult
from tandem.config import Config
from tandem.errors import RewardError, TandemError
from tandem.observe.best import Best
from tandem.observe.console import Console
from tandem.observe.folder import RunFolder
from tandem.observe.invalid import STEPS_IN_A_ROW, InvalidRewards
from tandem.observe.measurements import Measurements
from tandem.observe.metrics import formatted
from tandem.observe.mismatch import mismatch_error, mismatch_warning
from tandem.observe.rollout_log import RolloutLog
from tandem.observe.sample_text import first_problem
from tandem.observe.step_metrics import evaluation_metrics, num_tokens, step_metrics
from tandem.observe.stop import Stop
from tandem.observe.trackers import Trackers, check_trackers, start_trackers

_SHOWN_AS = {"to_rollout": "device to the engine", "to_train": "device to the trainer", "update_critic": "critic"}


class Run:
    """One run, from its first step to its last, over any number of processes that take it up one after the other.

    In each step call `log` before the checkpoint is saved: then a checkpoint never exists without the line of its
    step, and a killed run that goes on has the metrics of one that was never killed.

    Args:
        config: Resolved; it is written to the folder: to that of a run that goes on, by `keep_config`.
        stop: Set from elsewhere, such as a signal handler, to end the run after the step that is under way.
        console: Where the run shows itself.
        clock: Counts seconds.
    """

    def __init__(
        self,
        config: Config,
        *,
        stop: Stop | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.console = Console() if console is None else console
        self.stop = Stop() if stop is None else stop
        self.best = Best(config.evaluation.metric, config.evaluation.patience)
        self._invalid_rewards = InvalidRewards(config.reward.max_invalid_share)
        self.total: int | None = None  # number of the last step
        self._measured = Measurements(clock)
        self._exit = ExitStack()
        self._error: TandemError | None = None  # ends the run once the step is saved
        self._decided_at = 0  # the step after which `_ends` was decided
        self._ends = False

    def __enter__(self) -> Self:
        """Take the folder and start the trackers.

        Raises:
            ConfigError: A tracker's package is missing, or `run.folder` is not set.
            CheckpointError: The folder cannot be written, another process trains in it, or it holds a run of another
                config.
        """
        check_trackers(self.config.tracking)
        with ExitStack() as stack:
            self._folder = RunFolder(self.config)
            stack.callback(self._folder.close)
            stack.callback(self.console.close)
            self._show_changes()
            self._rollout_log = RolloutLog(
                self._folder.rollouts,
                every=self.config.tracking.rollouts_every,
                most=self.config.tracking.rollouts_max,
            )
            self._trackers: Trackers = start_trackers(
                self.config.tracking,
                folder=self.folder,
                run_config=self.config.model_dump(mode="json"),
                warn=lambda message: self.console.warn("tracker lost", message),
            )
            stack.callback(self._trackers.close)
            workers = self.config.cluster.num_workers  # what comes next
            self.console.phase("loading the model" if workers == 1 else f"starting Ray and {workers} workers")
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        return self._folder.path

    @property
    def ended_by(self) -> Literal["stop", "patience"] | None:
        """What ended the run before its last step, if anything did."""
        if not self._ends:
            return None
        return "patience" if self.best.patience_is_out else "stop"

    def keep_config(self) -> None:
        """Write the config to the folder of a run that goes on with it: once its checkpoint is loaded.

        Raises:
            CheckpointError: It cannot be written.
        """
        self._folder.keep_config()

    def steps(self, total: int, *, resume_from: int = 0) -> Iterator[int]:
        """The steps that are still to be made, 1 to `total`; fewer once a stop is asked for or patience is out.

        At once, not with the first step, what was written after `resume_from` is cut off.

        Args:
            total: Number of the last step.
            resume_from: The last step that the loaded checkpoint holds; 0 = none.

        Raises:
            CheckpointError: What was written cannot be cut.
            RewardError: After the third step in a row in which too many responses had no reward
                (`reward.max_invalid_share`), once its checkpoint is saved.
            TrainingError: Likewise, after a step in which engine and trainer were further apart than
                `algorithm.mismatch_stop`.
        """
        self.total = total
        self._folder.metrics.cut_back(resume_from)
        self._rollout_log.cut_back(resume_from)
        self._trackers.go_on_after(resume_from)
        self.console.begin_steps(resume_from, total)
        self.stop.steps_begun = True
        return self._remaining_steps(resume_from, total)

    def due(self, kind: Literal["evaluation", "checkpoint"], step: int) -> bool:
        """Whether step `step` evaluates, or is saved. Step 0 is the time before the first one.

        An evaluation falls due before the first step, every `evaluation.every` steps and after the last. A checkpoint
        falls due every `checkpoint.every` steps, after the last, at a new best, and where the run ends early, with an
        error that `steps` raises, too.
        """
        if kind == "evaluation":
            every = self.config.evaluation.every
            return self.config.evaluation.data is not None and (
                step in (0, self.total) or (every > 0 and step % every == 0)
            )
        every = self.config.checkpoint.every
        new_best = self.config.checkpoint.keep_best > 0 and self.best.step == step
        return step > 0 and (
            step == self.total
            or (every > 0 and step % every == 0)
            or new_best
            or self._error is not None
            or self._ends_after(step)
        )

    @contextmanager
    def timing(self, name: str) -> Generator[None]:
        """Add the time of the block to `timing_s/<name>` of the step, and show the name as what goes on."""
        self.console.phase(_SHOWN_AS.get(name, name))
        with self._measured.part(name):
            yield
        self.console.phase("")

    def record(self, name: str, value: float | None) -> None:
        """Take in a number that one rank has measured; None = it could not.

        Args:
            name: A metric of `memory/`, or `perf/reshard_gib`. Several of one step become one as the table says.
            value: In the metric's unit.
        """
        self._measured.record(name, value)

    def log_initial(self, evaluation: Evaluation) -> None:
        """Write the evaluation before the first step, as the line of step 0 of a new `metrics.jsonl`.

        Raises:
            CheckpointError: It cannot be written.
        """
        self._folder.metrics.cut_back(-1)
        self.best.observe(evaluation)
        seconds = self._measured.take()["timing_s/evaluation"]
        self._write(0, {**evaluation_metrics(evaluation), "timing_s/evaluation": seconds})
        self.console.note(
            f"before the first step: {self.best.metric} {evaluation_text(evaluation.metrics, self.best.metric)}"
        )
        self._warn_of_evaluation(evaluation)

    def log(
        self,
        step: int,
        rollouts: Rollouts,
        rewards: Rewards,
        advantages: Float[Tensor, " B"] | Float[Tensor, "B L"],
        update: UpdateResult | None,
        evaluation: Evaluation | None = None,
        critic: CriticUpdate | None = None,
    ) -> dict[str, float]:
        """Write and show a step: its rollouts, its line in `metrics.jsonl`, the console, the trackers.

        Args:
            step: Number of the step.
            rollouts: Its responses.
            rewards: Their rewards.
            advantages: Their advantages, one per response or per token.
            update: What the update did. None = the policy was not updated.
            evaluation: Held-out results, where the step evaluated.
            critic: What the critic's update did, where there is a critic.

        Returns:
            The step's metrics; NaN where something was not measured.

        Raises:
            CheckpointError: The disk is full or the folder is gone. Earlier lines are untouched.
        """
        if evaluation is not None:
            self.best.observe(evaluation)
        drawn = rewards.drawn or Drawn(rollouts, rewards)
        metrics = self._measured.take()
        metrics["perf/tokens_per_s"] = num_tokens(drawn.rollouts) / max(metrics["timing_s/step"], 1e-9)
        masked = self.config.algorithm.mask_truncated
        metrics = metrics | step_metrics(rollouts, rewards, update, evaluation, critic, mask_truncated=masked)
        self._rollout_log.write(step, rollouts, rewards, advantages, update)
        self._write(step, metrics)
        self.console.step(step, self.total or step, metrics, evaluated=f"eval/{self.config.evaluation.metric}")
        self._warn(step, drawn, update)
        self._check_mismatch(step, metrics["mismatch/kl"])
        if evaluation is not None:
            self._warn_of_evaluation(evaluation)
        if self._invalid_rewards.observe(drawn.rewards.num_invalid, len(drawn.rollouts)):
            self._error = self._without_rewards(step, drawn.rollouts, drawn.rewards)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the run, JSON-able."""
        return {"best": self.best.state_dict(), "invalid_rewards": self._invalid_rewards.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_changes: bool = False) -> None:
        """Go on from what `state_dict` returned. It fits any run: `allow_changes` is for parts that may refuse."""
        self.best.load_state_dict(state["best"])
        self._invalid_rewards.load_state_dict(state["invalid_rewards"])

    def _remaining_steps(self, done: int, total: int) -> Iterator[int]:
        if self.stop.is_set() or self.best.patience_is_out:
            self._ends = done < total
            return
        self._measured.take()  # what came before the first step is not a part of it
        for step in range(done + 1, total + 1):
            yield step
            if self._error is not None:
                raise self._error
            if self._ends_after(step):
                return

    def _ends_after(self, step: int) -> bool:
        """Decided once a step: a stop that comes after the checkpoint was not due waits for the next step's."""
        if self._decided_at != step:
            self._decided_at = step
            self._ends = step != self.total and (self.stop.is_set() or self.best.patience_is_out)
        return self._ends

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._folder.metrics.append({"step": step, **metrics})
        self._trackers.log(step, metrics)

    def _warn(self, step: int, drawn: Drawn, update: UpdateResult | None) -> None:
        if drawn.rewards.num_invalid:
            detail = first_problem(drawn.rollouts, drawn.rewards) or ""
            message = f"step {step}: {drawn.rewards.num_invalid} of {len(drawn.rollouts)} responses have no reward"
            self.console.warn("invalid rewards", message, detail)
        if drawn.num_missing:
            wanted = self.config.data.prompts_per_step
            found = f"{wanted - drawn.num_missing} of {wanted} groups have contrast"
            message = f"step {step}: drew {drawn.num_batches} batches, {found}"
            detail = "draw more (algorithm.max_resample), or take prompts that are neither too easy nor too hard"
            self.console.warn("too few groups with contrast", message, detail)
        if update is not None and update.num_skipped:
            message = f"step {step}: {update.num_skipped} updates skipped, loss or gradient was not finite"
            self.console.warn("skipped updates", message)

    def _check_mismatch(self, step: int, kl: float) -> None:
        warning = mismatch_warning(step, kl, self.config.algorithm, self.config.rollout)
        if warning is not None:
            self.console.warn("engine and trainer apart", *warning)
        self._error = mismatch_error(step, kl, self.config.algorithm, self.config.rollout)

    def _without_rewards(self, step: int, rollouts: Rollouts, rewards: Rewards) -> RewardError:
        share = self.config.reward.max_invalid_share
        return RewardError(
            f"in step {step}, the {STEPS_IN_A_ROW}rd in a row, {rewards.num_invalid} of {len(rollouts)} responses have "
            f"no reward, more than reward.max_invalid_share={share:g}; the first:\n{first_problem(rollouts, rewards)}",
            remedy="mend the reward function, then start the same command again: it goes on after this step; to train "
            "without these rewards, raise reward.max_invalid_share (with run.allow_changes=true)",
        )

    def _warn_of_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.num_invalid:
            message = f"step {evaluation.step}: {evaluation.num_invalid} responses of the evaluation have no reward"
            self.console.warn("invalid rewards in evaluation", message, evaluation.problem or "")

    def _show_changes(self) -> None:
        if self._folder.changed:
            for change in (*self._folder.changed.guarded, *self._folder.changed.free):
                self.console.note(f"changed since the run began: {change}")


def evaluation_text(metrics: Mapping[str, float], metric: str) -> str:
    """A metric of an evaluation for people, with its standard error where there is one."""
    value, error = metrics.get(metric, math.nan), metrics.get(f"{metric}_stderr", math.nan)
    if not math.isfinite(value):
        return "none"
    text = formatted(f"eval/{metric}", value)
    return f"{text} ± {error:.3f}" if math.isfinite(error) else text
