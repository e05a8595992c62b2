"""One rank with both sides on one device: the engine that samples, and the trainer that updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandem.algorithm.protocols import Loss
from tandem.batch import CriticUpdate, Prompt, Response, Rollouts, UpdateResult
from tandem.checkpoint import host_shards, optimizer_shards, read_moments, write_moments
from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.hybrid.own_weights import OwnWeights
from tandem.hybrid.rollout_side import RolloutSide, SharedWeights
from tandem.hybrid.shared_folder import check_shared
from tandem.hybrid.training_side import TrainingSide
from tandem.hybrid.vllm_weights import VllmWeights
from tandem.hybrid.worker_options import WorkerOptions
from tandem.model.hf import save_adapter, save_model
from tandem.model.ranks import ALONE, Ranks
from tandem.model.shards import Shard
from tandem.observe.memory import PeakMemory
from tandem.rollout.options import SamplingOptions
from tandem.trainer.critic import CriticBatch
from tandem.trainer.update import UpdateBatch

_GIB = 1 << 30
Peaks = Mapping[str, float | None]  # metric -> GiB; None = the system does not tell


class Worker:
    """What the controller calls, on every rank at once. Each phase leaves the device to the other one."""

    def __init__(self, options: WorkerOptions, tokenizer: PreTrainedTokenizerBase, ranks: Ranks = ALONE) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.training = TrainingSide(options, tokenizer, ranks)
        self.sampling: RolloutSide
        if options.engine == "vllm":
            self.sampling = VllmWeights(self.training, ranks)
        else:
            self.sampling = SharedWeights(self.training) if ranks.alone else OwnWeights(self.training, ranks)
        self._memory = PeakMemory(options.device)
        self._peaks: dict[str, float | None] = {}
        self._snapshot: tuple[Mapping[str, Shard], Mapping[str, Shard]] | None = None

    # Phases

    def enter_rollout(self, policy_version: int) -> int:
        """Hand the device to the engine, with the weights as they are. Returns the bytes that went between ranks."""
        self._start_measuring()
        self.training.put_moments_away()
        moved = self.sampling.load(self.training, policy_version)
        self.training.put_weights_away()
        self.sampling.wake(policy_version)
        self._note_peak("memory/to_rollout_gib")
        return 0 if moved is None else moved.bytes_moved

    def leave_rollout(self) -> Peaks:
        """Free the KV cache. Returns the peaks of memory."""
        self._note_peak("memory/rollout_gib")
        self.sampling.sleep()
        return self._take_peaks()

    def enter_train(self) -> None:
        """Hand the device to the trainer."""
        self._start_measuring()
        self.sampling.release()
        self.training.bring_back()
        self._note_peak("memory/to_train_gib")

    def leave_train(self) -> Peaks:
        """Returns the peaks of memory. What was loaded stays until the engine needs the device."""
        self._note_peak("memory/train_gib")
        return self._take_peaks()

    def _start_measuring(self) -> None:
        if self.options.measure_memory:  # the peak belongs to the process, in which others may measure, too
            self._memory.start()

    def _note_peak(self, metric: str) -> None:
        """The peak since the last one."""
        peak = self._memory.stop()
        self._peaks[metric] = None if peak is None else peak / _GIB
        self._start_measuring()

    def _take_peaks(self) -> Peaks:
        peaks = dict(self._peaks)
        self._peaks.clear()
        return peaks

    # Rollout side

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        """Yield responses as they end."""
        return self.sampling.stream(prompts, options)

    # Update side

    def old_logprobs(self, rollouts: Rollouts) -> Float[Tensor, "B L"]:
        """Log-probs of the response tokens under the policy as it is."""
        return self.training.old_logprobs(rollouts)

    def ref_logprobs(self, rollouts: Rollouts, source: ModelConfig) -> Float[Tensor, "B L"]:
        """Log-probs under the reference, which is loaded from `source` the first time."""
        return self.training.ref_logprobs(rollouts, source)

    def values(self, rollouts: Rollouts) -> Float[Tensor, "B L"]:
        """The critic's values of the states in which the response tokens were chosen; it is loaded the first time."""
        return self.training.values(rollouts)

    def update_critic(self, batch: CriticBatch) -> CriticUpdate:
        """One step's optimizer updates of the critic: see `update_critic`."""
        return self.training.update_critic(batch)

    def update(self, batch: UpdateBatch, loss: Loss, *, lr: float, step: int, policy_version: int) -> UpdateResult:
        """One step's optimizer updates: see `update_policy`."""
        return self.training.update(batch, loss, lr=lr, step=step, policy_version=policy_version)

    def supervised_update(self, rollouts: Rollouts, lr: float) -> float:
        """One optimizer step of maximum likelihood; returns the loss."""
        return self.training.supervised_update(rollouts, lr)

    def reset_optimizer(self) -> None:
        """Forget the moments, as if no update had been made."""
        self.training.reset_optimizer()

    # Saving

    def state(self) -> dict[str, Any]:
        """Counters that belong into a checkpoint, JSON-able."""
        state: dict[str, Any] = {"skipped_in_row": self.training.optimizer.skipped_in_row}
        if self.training.critic is not None:
            state["critic"] = self.training.critic.state()
        return state

    def load_optimizer(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Take up the moments of a checkpoint. The weights were loaded from it when the worker was made."""
        read_moments(checkpoint, self._moments())
        self.training.optimizer.skipped_in_row = int(state["skipped_in_row"])
        if self.options.critic is not None and "critic" in state:  # else the run had none so far, and begins with one
            self.training.load_critic(checkpoint / "critic", state["critic"])

    def take_snapshot(self, *, copy: bool) -> None:
        """Remember weights and moments for `write_snapshot`; with `copy` as they are now, while training goes on."""
        self._snapshot = None  # of a save that failed
        if self.options.offload != "none":  # what comes back needs the room
            self.sampling.release()
        self.training.bring_back()
        self._snapshot = (
            host_shards(self.training.weights.shards(), copy=copy),
            host_shards(self._moments(), copy=copy),
        )
        if self.training.critic is not None:
            self.training.critic.take_snapshot(copy=copy)

    def write_snapshot(self, folder: Path) -> None:
        """Write this rank's part of the snapshot into the folder of a checkpoint, and forget it. No collectives."""
        assert self._snapshot is not None
        weights, moments = self._snapshot
        try:
            self._save(folder / "model", weights, torch.float32, made=folder)
            write_moments(folder, moments, lead=self.ranks.rank == 0)
            if self.training.critic is not None:
                self.training.critic.write_snapshot(folder / "critic", self.tokenizer)
        finally:
            self._snapshot = None

    def load_weights(self) -> None:
        """Get ready for `save`."""
        self.training.bring_weights_back()

    def save(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write this rank's part of a Hugging Face folder, which is there: float32 weights, cast to `dtype`.

        Of an adapted policy the adapters are written, float32: `whole_model` makes a model of them.
        """
        self._save(folder, self.training.weights.shards(), dtype, made=folder)

    def _save(self, folder: Path, weights: Mapping[str, Shard], dtype: torch.dtype | None, *, made: Path) -> None:
        """The controller has made the folder `made`: a machine that does not see it would write into another one."""
        check_shared(made)
        training, lead = self.training, self.ranks.rank == 0
        if training.lora is not None:
            if training.base is None:
                raise ModelError(
                    "adapters are saved beside their base, and this one has no files of its own: it is a new model, or "
                    "an adapter itself",
                    remedy="start with model.lora_rank=0, export the model, and take that folder as model.path",
                )
            save_adapter(
                training.policy.model,
                folder,
                tokenizer=self.tokenizer,
                shards=weights,
                lora=training.lora,
                base=training.base,
                lead=lead,
            )
            return
        save_model(
            training.policy.model,
            folder,
            tokenizer=self.tokenizer,
            shards=weights,
            names=training.names,
            dtype=dtype,
            lead=lead,
        )

    def _moments(self) -> dict[str, Shard]:
        return optimizer_shards(
            self.training.weights.shards(), self.training.optimizer.adamw, lead=self.ranks.rank == 0
        )
