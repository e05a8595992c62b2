"""The critic of a worker: weights of its own, beside the policy's, which are on the device while they are used."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.batch import CriticUpdate, Rollouts
from tandem.checkpoint import host_shards, optimizer_shards, read_moments, write_moments
from tandem.hybrid.trainable import Trainable
from tandem.hybrid.worker_options import WorkerOptions
from tandem.model.file_names import FileNames
from tandem.model.hf import attention_name, read_config, save_model
from tandem.model.ranks import Ranks
from tandem.model.shards import Shard
from tandem.model.skeleton import materialise
from tandem.model.value import read_value_weights, take_body, value_skeleton
from tandem.trainer.critic import Critic, CriticBatch, batch_values, update_critic
from tandem.trainer.fsdp import ShardedWeights
from tandem.trainer.master_weights import MasterWeights
from tandem.trainer.offload import Offload
from tandem.trainer.weights import Weights


class CriticSide:
    """Values and their updates. In a checkpoint it is a folder with `model` and `optimizer`, like the policy's.

    Args:
        options: Of the worker; its `critic` is set.
        ranks: Those that train it together.
        mesh: Over which its weights are spread. None = this rank has all of them.
        path: Where the weights come from. None = the body of the policy as it is now, without adapters, and a new head.
        key: What gave the path, for messages.
        policy, policy_shards: The policy's model, and its weights by the names that they have without adapters.

    Raises:
        ModelError: Weights are missing, or do not fit the config; or there is no such value model.
    """

    def __init__(
        self,
        options: WorkerOptions,
        ranks: Ranks,
        mesh: DeviceMesh | None,
        *,
        path: str | None,
        key: str,
        policy: PreTrainedModel,
        policy_shards: Mapping[str, Shard],
    ) -> None:
        assert options.critic is not None
        self._options = options
        self._config = options.critic
        self._ranks = ranks
        self._alone = mesh is None
        source = options.model.model_copy(update={"path": path, "new": None, "lora_rank": 0})
        model = value_skeleton(
            policy.config if path is None else read_config(source, key=key),
            attention=attention_name(source),
            trust_remote_code=source.trust_remote_code,
        )
        self._names = FileNames(model)

        def fill(shards: Mapping[str, Shard]) -> None:
            if path is None:
                take_body(model, shards, policy, policy_shards)
            else:
                read_value_weights(source, model, shards, names=self._names, key=key)

        self.critic = Critic(model, body_dtype=options.dtype)
        self.weights: Weights
        if mesh is None:
            materialise(model, options.device)
            fill({name: Shard.whole(parameter) for name, parameter in model.named_parameters()})
            self.weights = MasterWeights(model, body_dtype=options.dtype, head_dtype=options.head_dtype)
        else:
            self.weights = ShardedWeights(self.critic, mesh, head_dtype=options.head_dtype, device=options.device)
            fill(self.weights.shards())
        self.trained = Trainable(self.critic, self.weights, options, ranks, lr_key="critic.lr")
        self.num_updates = 0  # calls of `update`: the number that seeds the order of mini-batches
        self._away = Offload(options.offload, options.offload_folder)
        self._snapshot: tuple[Mapping[str, Shard], Mapping[str, Shard]] | None = None

    def values(self, rollouts: Rollouts) -> Float[Tensor, "B L"]:
        """See `batch_values`."""
        with self._here():
            return batch_values(self.critic, rollouts, self.trained.packing, self._ranks)

    def update(self, batch: CriticBatch) -> CriticUpdate:
        """See `update_critic`."""
        self.num_updates += 1
        with self._here():
            self.trained.train_mode()
            return update_critic(
                self.critic,
                self.trained.optimizer,
                batch,
                self.trained.update_options,
                self._ranks,
                clip=self._config.clip_value,
                lr=self._config.lr,
                seed=(self._options.seed, self.num_updates),
            )

    @contextmanager
    def _here(self) -> Generator[None]:
        """Away in between: the policy's update needs the memory."""
        self.bring_back()
        try:
            yield
        finally:
            self.put_away()

    def put_away(self) -> None:
        """Free the memory of weights and moments."""
        self._away.away(self._tensors())

    def bring_back(self) -> None:
        """The opposite; does nothing where they are there."""
        self._away.back()

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.weights.parameters()
        if self._alone:  # what is computed with may be another tensor
            yield from self.critic.model.parameters()
        yield from self.trained.moments()

    def state(self) -> dict[str, Any]:
        """Counters that belong into a checkpoint, JSON-able."""
        return {"num_updates": self.num_updates, "skipped_in_row": self.trained.optimizer.skipped_in_row}

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take up moments and counters. The weights were loaded from the folder when this was made."""
        read_moments(folder, self._moments(), checkpoint=folder.parent)
        self.num_updates = int(state["num_updates"])
        self.trained.optimizer.skipped_in_row = int(state["skipped_in_row"])

    def take_snapshot(self, *, copy: bool) -> None:
        """Remember weights and moments for `write_snapshot`; with `copy` as they are now."""
        self._snapshot = None  # of a save that failed
        self.bring_back()
        self._snapshot = (host_shards(self.weights.shards(), copy=copy), host_shards(self._moments(), copy=copy))

    def write_snapshot(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write this rank's part of the snapshot, and forget it. No collectives."""
        assert self._snapshot is not None
        (weights, moments), self._snapshot = self._snapshot, None
        lead = self._ranks.rank == 0
        save_model(
            self.critic.model,
            folder / "model",
            tokenizer=tokenizer,
            shards=weights,
            names=self._names,
            dtype=torch.float32,
            lead=lead,
        )
        write_moments(folder, moments, lead=lead)

    def _moments(self) -> dict[str, Shard]:
        return optimizer_shards(self.weights.shards(), self.trained.optimizer.adamw, lead=self._ranks.rank == 0)
