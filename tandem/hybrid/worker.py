"""One rank with both sides on one device: the engine that samples, and the trainer that updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.algorithm.protocols import Loss
from tandem.batch import Prompt, Response, Rollouts, UpdateResult
from tandem.checkpoint import host_shards, optimizer_shards, read_moments, write_moments
from tandem.config.model import ModelConfig
from tandem.config.trainer import TrainerConfig
from tandem.model.build import build_model, new_config
from tandem.model.facts import ModelFacts
from tandem.model.hf import attention_name, load_model, save_model
from tandem.model.shards import Shard
from tandem.rollout.embedded import EmbeddedEngine
from tandem.rollout.options import SamplingOptions
from tandem.trainer.budget import plan_memory
from tandem.trainer.logprobs import batch_logprobs
from tandem.trainer.master_weights import MasterWeights, round_weights
from tandem.trainer.optim import Optimizer
from tandem.trainer.packing import PackingOptions
from tandem.trainer.policy import Policy
from tandem.trainer.supervised import supervised_update
from tandem.trainer.update import UpdateBatch, UpdateOptions, update_policy


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is made from; every `auto` that does not need the model is resolved."""

    model: ModelConfig
    trainer: TrainerConfig
    facts: ModelFacts
    device: torch.device
    dtype: torch.dtype  # of the computation
    head_dtype: torch.dtype
    max_sequence: int  # longest prompt and response together, in tokens
    max_concurrent: int
    kv_cache_bytes: int | None
    seed: int


class Worker:
    """Holds the model once; engine and trainer use the same tensors, in turns."""

    def __init__(self, options: WorkerOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.model = self._load(options.model)
        memory = plan_memory(
            self.model.config,
            dtype=options.dtype,
            device=options.device,
            max_sequence=options.max_sequence,
            micro_batch_tokens=options.trainer.micro_batch_tokens,
            activation_checkpointing=options.trainer.activation_checkpointing,
        )
        self.checkpointing = memory.activation_checkpointing
        if self.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.packing = PackingOptions(options.trainer.packing, memory.micro_batch_tokens)
        self.weights = MasterWeights(self.model, body_dtype=options.dtype, head_dtype=options.head_dtype)
        self.policy = self._as_policy(self.model)
        self.optimizer = Optimizer(
            self.weights,
            betas=options.trainer.betas,
            weight_decay=options.trainer.weight_decay,
            max_grad_norm=options.trainer.max_grad_norm,
            max_skipped=options.trainer.max_skipped_updates,
        )
        self.engine = EmbeddedEngine(
            self.model,
            tokenizer,
            eos_ids=options.facts.eos_ids,
            max_concurrent=options.max_concurrent,
            kv_cache_bytes=options.kv_cache_bytes,
        )
        self.engine.sleep()
        self.reference: Policy | None = None

    def _load(self, model: ModelConfig) -> PreTrainedModel:
        if model.new is not None:
            return build_model(
                new_config(model.new, self.tokenizer),
                seed=self.options.seed,
                attention=attention_name(model),
                device=self.options.device,
            )
        return load_model(model, device=self.options.device, dtype=torch.float32)

    def _as_policy(self, model: PreTrainedModel) -> Policy:
        return Policy(model, chunk_tokens=self.options.trainer.logits_chunk_tokens)

    # Rollout side

    def wake_engine(self, policy_version: int) -> None:
        """Get the engine ready to sample with the weights as they are."""
        self.model.eval()
        self.engine.wake(policy_version)

    def sleep_engine(self) -> None:
        """Free the KV cache."""
        self.engine.sleep()

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        """Yield responses as they end."""
        return self.engine.stream(prompts, options)

    # Update side

    def old_logprobs(self, rollouts: Rollouts) -> Float[Tensor, "B L"]:
        """Log-probs of the response tokens under the policy as it is."""
        return batch_logprobs(self.policy, rollouts, self.packing)

    def ref_logprobs(self, rollouts: Rollouts, source: ModelConfig) -> Float[Tensor, "B L"]:
        """Log-probs under the reference, which is loaded from `source` the first time."""
        if self.reference is None:
            model = self._load(source)
            round_weights(model, body_dtype=self.options.dtype, head_dtype=self.options.head_dtype)
            self.reference = self._as_policy(model.requires_grad_(requires_grad=False))
        return batch_logprobs(self.reference, rollouts, self.packing)

    def update(self, batch: UpdateBatch, loss: Loss, *, lr: float, step: int, policy_version: int) -> UpdateResult:
        """One step's optimizer updates: see `update_policy`."""
        self.model.train(self.checkpointing)  # transformers checkpoints activations in training mode only
        trainer = self.options.trainer
        return update_policy(
            self.policy,
            self.optimizer,
            batch,
            loss,
            UpdateOptions(
                packing=self.packing,
                mini_batch_responses=trainer.mini_batch_responses,
                shuffle=trainer.mini_batch_shuffle,
                epochs=trainer.update_epochs,
            ),
            lr=lr,
            seed=(self.options.seed, step),
            policy_version=policy_version,
        )

    def supervised_update(self, rollouts: Rollouts, lr: float) -> float:
        """One optimizer step of maximum likelihood; returns the loss."""
        self.model.train(self.checkpointing)
        return supervised_update(self.policy, self.optimizer, rollouts, self.packing, lr=lr)

    def reset_optimizer(self) -> None:
        """Forget the moments, as if no update had been made."""
        self.optimizer.reset()

    # Saving

    def state(self) -> dict[str, Any]:
        """Counters that belong into a checkpoint, JSON-able."""
        return {"skipped_in_row": self.optimizer.skipped_in_row}

    def load_optimizer(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Take up the moments of a checkpoint. The weights were loaded from it when the worker was made."""
        read_moments(checkpoint, self._moments())
        self.optimizer.skipped_in_row = int(state["skipped_in_row"])

    def saver(self, *, copy: bool) -> Callable[[Path], None]:
        """Writes weights and moments as they are now into a checkpoint; with `copy` while this worker trains on.

        A thread must call it directly: settings that a group applies around its calls are those of the whole process.
        """
        weights = host_shards(self.weights.shards(), copy=copy)
        moments = host_shards(self._moments(), copy=copy)

        def save(checkpoint: Path) -> None:
            save_model(self.model, checkpoint / "model", tokenizer=self.tokenizer, shards=weights, dtype=torch.float32)
            write_moments(checkpoint, moments)

        return save

    def save(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write a Hugging Face folder of the float32 masters, cast to `dtype`."""
        save_model(self.model, folder, tokenizer=self.tokenizer, shards=self.weights.shards(), dtype=dtype)

    def _moments(self) -> dict[str, Shard]:
        return optimizer_shards(self.weights.shards(), self.optimizer.adamw)
