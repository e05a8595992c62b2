"""The controller's handle on the workers: two phases that take turns, checkpoints, export."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.algorithm.protocols import Loss
from tandem.batch import Evaluation
from tandem.checkpoint import CheckpointWriter, complete_or_absent, complete_or_as_it_was, read_state
from tandem.config.model import ModelConfig
from tandem.config.rollout import RolloutConfig
from tandem.errors import CheckpointError, ClusterError
from tandem.hybrid.phases import PhaseMachine, Unwatched, Watch
from tandem.hybrid.reference import KeptReference
from tandem.hybrid.rollout_phase import RolloutPhase
from tandem.hybrid.train_phase import TrainPhase
from tandem.hybrid.train_settings import TrainSettings
from tandem.hybrid.worker import Peaks, Worker
from tandem.model.facts import ModelFacts
from tandem.model.merge import merge_adapter
from tandem.runtime.worker_group import WorkerGroup

_GIB = 1 << 30


class Stateful(Protocol):
    """Something whose position belongs into a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], *, allow_changes: bool) -> None: ...


class Workers:
    """One set of devices that samples and trains, in turns. Made by `start` or `start_workers`."""

    def __init__(
        self,
        group: WorkerGroup[Worker],
        *,
        tokenizer: PreTrainedTokenizerBase,
        facts: ModelFacts,
        rollout: RolloutConfig,
        train: TrainSettings,
        reference: ModelConfig,
        kept_reference: KeptReference | None = None,
        writer: CheckpointWriter | None = None,
        checkpoint: Path | None = None,
        watch: Watch | None = None,
    ) -> None:
        """See `start_workers`.

        Args:
            group: The ranks.
            tokenizer, facts: Of the policy.
            rollout: How responses are sampled where a call does not say otherwise.
            train: The same for updates.
            reference: Where the reference model is loaded from, if it is needed.
            kept_reference: What `keep_reference` writes, if no other place has the reference for as long as the run.
            writer: Of the run's checkpoints.
            checkpoint: The one that the weights were loaded from.
            watch: Is told how long things take.
        """
        self.tokenizer = tokenizer
        self.facts = facts
        self.policy_version = 0
        self.watch: Watch = Unwatched() if watch is None else watch
        self._group = group
        self._rollout = rollout
        self._train = train
        self._reference = reference
        self._kept_reference = kept_reference
        self._writer = writer
        self._checkpoint = checkpoint
        self._phases = PhaseMachine()
        self._num_updates = 0  # calls of TrainPhase.update: the schedule's step
        self._num_critic_updates = 0  # calls of TrainPhase.update_critic: those of its warm-up, first

    @property
    def loss(self) -> Loss:
        """What updates descend on where a call does not say otherwise."""
        return self._train.loss

    @contextmanager
    def rollout_phase(self, *, timed_as: str = "rollout") -> Generator[RolloutPhase]:
        """The engine has the device: weights and KV cache, no gradients. Hands out what is legal meanwhile.

        Args:
            timed_as: Name under which the time in the engine is counted.

        Raises:
            PhaseError: Another phase is open.
        """
        with self._phases.enter("rollout"):
            with self.watch.timing("to_rollout"):
                moved = self._group.call(Worker.enter_rollout, self.policy_version)
            self.watch.record("perf/reshard_gib", moved / _GIB)
            phase = RolloutPhase(
                self._group,
                self._rollout,
                seed=self._train.seed,
                policy_version=self.policy_version,
                watch=self.watch,
                timed_as=timed_as,
            )
            try:
                yield phase
            finally:
                phase.close()
                self._record(self._group.call_each(Worker.leave_rollout))

    @contextmanager
    def train_phase(self) -> Generator[TrainPhase]:
        """The trainer has the device: weights, gradients, optimizer state, no KV cache.

        Raises:
            PhaseError: Another phase is open.
        """
        with self._phases.enter("train"):
            with self.watch.timing("to_train"):
                self._group.call(Worker.enter_train)
            phase = TrainPhase(
                self._group,
                self._train,
                self._reference,
                policy_version=self.policy_version,
                num_updates=self._num_updates,
                num_critic_updates=self._num_critic_updates,
                watch=self.watch,
            )
            try:
                yield phase
            finally:
                phase.close()
                self.policy_version = phase.policy_version
                self._num_updates = phase.num_updates
                self._num_critic_updates = phase.num_critic_updates
                self._record(self._group.call_each(Worker.leave_train))

    def _record(self, peaks: Sequence[Peaks]) -> None:
        """The peaks of memory of each rank."""
        for of_rank in peaks:
            for metric, value in of_rank.items():
                self.watch.record(metric, value)

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model that engine and trainer share, in this process.

        Raises:
            ClusterError: There are several workers: each has a part of it only.
        """
        if self._group.num_workers > 1:
            raise ClusterError(
                f"the model is spread over {self._group.num_workers} workers, and whole in none of them",
                remedy="export it and load the folder, or start one worker in this process (num_workers=1)",
            )
        return self._group.call(_model_of)

    def export(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
        """Write the policy as a Hugging Face folder; `dtype` None = as the model was saved.

        A folder that is there gets the new files in place of the old ones of the same names, once all are written.

        Raises:
            PhaseError: A phase is open.
            CheckpointError: The folder cannot be written.
        """
        self._phases.check_between("export the model")
        folder = Path(folder).absolute()
        try:
            with complete_or_as_it_was(folder) as partial:
                self._save(partial, dtype or self.facts.dtype)
        except OSError as error:
            raise CheckpointError(f"the model cannot be written to {folder}: {error}") from error
        return folder

    def _save(self, folder: Path, dtype: torch.dtype) -> None:
        """Each rank writes its part. Where one cannot, nothing but the folder is lost."""
        self._group.call(Worker.load_weights)
        self._group.start(Worker.save, folder, dtype).result()
        merge_adapter(folder, dtype=dtype)

    def keep_reference(self) -> None:
        """Keep the reference for the KL term in the run's folder: the policy as it is now, or a copy.

        Needed where no other place has it: after a warm start, for a model with new weights, for that of a run.

        Raises:
            CheckpointError: It cannot be written.
        """
        kept = self._kept_reference
        if kept is None:
            return
        try:
            with complete_or_absent(kept.folder) as partial:  # in place of that of an earlier beginning of this run
                if kept.source is None:
                    self._save(partial, torch.float32)
                else:
                    shutil.copytree(kept.source, partial, dirs_exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"the reference cannot be written to {kept.folder}: {error}",
                remedy="free disk space or set run.folder to another disk, then start the same command again",
            ) from error

    def save_checkpoint(self, step: int, parts: Mapping[str, Stateful], evaluation: Evaluation | None = None) -> None:
        """Save everything that the run needs to go on after `step`; in the background, once copies are made.

        Args:
            step: The last step that is contained.
            parts: What else has a position: name -> the data, the run.
            evaluation: That of this step, for keeping the best.

        Raises:
            CheckpointError: This checkpoint or the one before it could not be written.
        """
        assert self._writer is not None, "these workers have no run folder"
        self._phases.check_between("save a checkpoint")
        with self.watch.timing("checkpoint"):
            self._writer.wait()  # before copying: never two copies at a time
            self._group.call(Worker.take_snapshot, copy=self._writer.background)
            state = {
                "policy_version": self.policy_version,
                "num_updates": self._num_updates,
                "worker": self._group.call(Worker.state),
                "parts": {name: part.state_dict() for name, part in parts.items()},
            }
            metrics = {} if evaluation is None else evaluation.metrics
            self._writer.write(step, state, metrics, self._write_snapshot)

    def _write_snapshot(self, folder: Path) -> None:
        """Each rank writes its part, while training goes on."""
        self._group.start(Worker.write_snapshot, folder).result()

    def load_checkpoint(self, parts: Mapping[str, Stateful], *, allow_changes: bool = False) -> int:
        """Go on from the run's newest checkpoint, if there is one.

        Args:
            parts: What was saved beside the policy: see `save_checkpoint`.
            allow_changes: A part may go on although it differs from that of then, such as other data.

        Returns:
            Its step; 0 where there is none.

        Raises:
            CheckpointError: It is damaged or belongs to another model.
        """
        if self._writer is not None:
            self._writer.clean()
        if self._checkpoint is None:
            return 0
        state = read_state(self._checkpoint)
        self._group.call(Worker.load_optimizer, self._checkpoint, state["worker"])
        self.policy_version = state["policy_version"]
        self._num_updates = state["num_updates"]
        self._num_critic_updates = state["worker"].get("critic", {}).get("num_updates", 0)
        for name, part in parts.items():
            part.load_state_dict(state["parts"][name], allow_changes=allow_changes)
        assert self._writer is not None
        kept = self._kept_reference
        if kept is not None and not kept.folder.exists():  # one that was given only now
            self.keep_reference()
        self._writer.delete_old()  # a killed process may have had no time for it
        return int(state["step"])

    def reset_optimizer(self) -> None:
        """Forget AdamW's moments, as after a warm start."""
        self._phases.check_between("reset the optimizer")
        self._group.call(Worker.reset_optimizer)

    def close(self) -> None:
        """Wait for a checkpoint that is being written, then end the workers.

        Raises:
            CheckpointError: It could not be written.
        """
        try:
            if self._writer is not None:
                self._writer.wait()
        finally:
            self._group.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _model_of(worker: Worker) -> PreTrainedModel:
    return worker.training.policy.model
