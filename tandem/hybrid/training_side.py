"""The side of a worker that updates the policy: weights, gradients, moments; with the reference and the critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandem.algorithm.protocols import Loss
from tandem.batch import CriticUpdate, Rollouts, UpdateResult
from tandem.config.model import ModelConfig
from tandem.errors import CheckpointError, ModelError
from tandem.hybrid.critic_side import CriticSide
from tandem.hybrid.loading import load_policy, load_reference
from tandem.hybrid.trainable import Trainable
from tandem.hybrid.worker_options import WorkerOptions
from tandem.model.ranks import Ranks
from tandem.model.shards import Shard
from tandem.trainer.critic import CriticBatch
from tandem.trainer.fsdp import training_mesh
from tandem.trainer.logprobs import batch_logprobs
from tandem.trainer.offload import Offload
from tandem.trainer.policy import Policy
from tandem.trainer.supervised import supervised_update
from tandem.trainer.update import UpdateBatch, update_policy


class TrainingSide:
    """Trains on this rank's part of the weights. Between training phases its memory can be put away."""

    def __init__(self, options: WorkerOptions, tokenizer: PreTrainedTokenizerBase, ranks: Ranks) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.ranks = ranks
        self._mesh = (
            None if ranks.alone else training_mesh(ranks, replicas=options.trainer.replicas, device=options.device)
        )
        loaded = load_policy(options.model, options, tokenizer, self._mesh)
        self.policy, self.weights, self.names = loaded.policy, loaded.weights, loaded.names
        self.lora, self.base = loaded.lora, loaded.base
        self._trained = Trainable(self.policy, self.weights, options, ranks, lr_key="trainer.lr")
        self.packing, self.optimizer = self._trained.packing, self._trained.optimizer
        self.critic: CriticSide | None = None
        self._moments = self._offload()
        self._masters = self._offload()
        self.reference: Policy | None = None
        self._reference_weights = self._offload()
        self._reference_tensors: Sequence[Tensor] = ()

    def _offload(self) -> Offload:
        return Offload(self.options.offload, self.options.offload_folder)

    def put_moments_away(self) -> None:
        """Free the memory of the optimizer's state, and all of the critic's. An update leaves no gradients."""
        self._moments.away(self._trained.moments())
        if self.critic is not None:
            self.critic.put_away()

    def put_weights_away(self) -> None:
        """Free the memory of the float32 weights, as far as nobody else computes with them."""
        self._masters.away(self.weights.freeable())

    def bring_weights_back(self) -> None:
        """The opposite; does nothing where they are there."""
        self._masters.back()

    def bring_back(self) -> None:
        """Be ready to train, or to be saved."""
        self._masters.back()
        self._moments.back()

    def engine_shards(self) -> Mapping[str, Shard]:
        """All weights, by the names that they have without adapters around them, and the adapters' factors."""
        shards = self.weights.every_shard()
        return shards if self.lora is None else {self.lora.base_name(name): each for name, each in shards.items()}

    def old_logprobs(self, rollouts: Rollouts) -> Float[Tensor, "B L"]:
        """Log-probs of the response tokens under the policy as it is."""
        return batch_logprobs(self.policy, rollouts, self.packing, self.ranks)

    def ref_logprobs(self, rollouts: Rollouts, source: ModelConfig) -> Float[Tensor, "B L"]:
        """Log-probs under the reference, which is loaded from `source` the first time, and is away between calls.

        That of an adapted policy, if it is the base, is the policy with its adapters off.
        """
        if self.lora is not None and source == self.options.model:
            with self.lora.off():
                return self.old_logprobs(rollouts)
        if self.reference is None:
            self.reference, self._reference_tensors = load_reference(source, self.options, self.tokenizer, self._mesh)
        self._reference_weights.back()
        try:
            return batch_logprobs(self.reference, rollouts, self.packing, self.ranks)
        finally:
            self._reference_weights.away(self._reference_tensors)

    def values(self, rollouts: Rollouts) -> Float[Tensor, "B L"]:
        """The critic's values. It is loaded the first time; without `critic.path` it begins as the policy is then."""
        return self._loaded_critic().values(rollouts)

    def update_critic(self, batch: CriticBatch) -> CriticUpdate:
        """One step's optimizer updates of the critic: see `update_critic`."""
        return self._loaded_critic().update(batch)

    def load_critic(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Go on with the critic of a checkpoint.

        Raises:
            CheckpointError: It is damaged, or belongs to another model.
        """
        try:
            critic = self._make_critic(str(folder), key="critic")
        except ModelError as error:
            raise CheckpointError(
                f"{folder.parent} cannot be loaded: {error.message}",
                remedy="it is damaged: delete this checkpoint folder to use an older one",
            ) from error
        critic.load(folder, state)
        self.critic = critic

    def _loaded_critic(self) -> CriticSide:
        if self.critic is None:
            assert self.options.critic is not None, "there is no critic"
            self.critic = self._make_critic(self.options.critic.path, key="critic.path")
        return self.critic

    def _make_critic(self, path: str | None, *, key: str) -> CriticSide:
        return CriticSide(
            self.options,
            self.ranks,
            self._mesh,
            path=path,
            key=key,
            policy=self.policy.model,
            policy_shards=self.engine_shards(),  # of an adapted one the base's
        )

    def update(self, batch: UpdateBatch, loss: Loss, *, lr: float, step: int, policy_version: int) -> UpdateResult:
        """One step's optimizer updates: see `update_policy`."""
        self._trained.train_mode()
        return update_policy(
            self.policy,
            self.optimizer,
            batch,
            loss,
            self._trained.update_options,
            self.ranks,
            lr=lr,
            seed=(self.options.seed, step),
            policy_version=policy_version,
        )

    def supervised_update(self, rollouts: Rollouts, lr: float) -> float:
        """One optimizer step of maximum likelihood; returns the loss."""
        self._trained.train_mode()
        return supervised_update(self.policy, self.optimizer, rollouts, self.packing, self.ranks, lr=lr)

    def reset_optimizer(self) -> None:
        """Forget the moments, as if no update had been made."""
        self._moments.back()
        self.optimizer.reset()
