"""The side of a worker that updates the policy: weights, gradients, moments, and the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandem.algorithm.protocols import Loss
from tandem.batch import Rollouts, UpdateResult
from tandem.config.model import ModelConfig
from tandem.hybrid.loading import load_policy, load_reference
from tandem.hybrid.worker_options import WorkerOptions
from tandem.model.ranks import Ranks
from tandem.trainer.budget import plan_memory
from tandem.trainer.fsdp import training_mesh
from tandem.trainer.logprobs import batch_logprobs
from tandem.trainer.offload import Offload
from tandem.trainer.optim import Optimizer
from tandem.trainer.packing import PackingOptions
from tandem.trainer.policy import Policy
from tandem.trainer.supervised import supervised_update
from tandem.trainer.update import UpdateBatch, UpdateOptions, update_policy


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
        memory = plan_memory(
            self.policy.model.config,
            dtype=options.dtype,
            device=options.device,
            max_sequence=options.max_sequence,
            micro_batch_tokens=options.trainer.micro_batch_tokens,
            activation_checkpointing=options.trainer.activation_checkpointing,
            ranks=ranks,
        )
        self.checkpointing = memory.activation_checkpointing
        if self.checkpointing:
            self.policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.packing = PackingOptions(options.trainer.packing, memory.micro_batch_tokens)
        self.optimizer = Optimizer(
            self.weights,
            betas=options.trainer.betas,
            weight_decay=options.trainer.weight_decay,
            max_grad_norm=options.trainer.max_grad_norm,
            max_skipped=options.trainer.max_skipped_updates,
        )
        self._moments = self._offload()
        self._masters = self._offload()
        self.reference: Policy | None = None
        self._reference_weights = self._offload()
        self._reference_tensors: Sequence[Tensor] = ()

    def _offload(self) -> Offload:
        return Offload(self.options.offload, self.options.offload_folder)

    def put_moments_away(self) -> None:
        """Free the memory of the optimizer's state. There are no gradients: an update leaves none."""
        self._moments.away(self._optimizer_tensors())

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

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for state in self.optimizer.adamw.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0)

    def old_logprobs(self, rollouts: Rollouts) -> Float[Tensor, "B L"]:
        """Log-probs of the response tokens under the policy as it is."""
        return batch_logprobs(self.policy, rollouts, self.packing, self.ranks)

    def ref_logprobs(self, rollouts: Rollouts, source: ModelConfig) -> Float[Tensor, "B L"]:
        """Log-probs under the reference, which is loaded from `source` the first time, and is away between calls."""
        if self.reference is None:
            self.reference, self._reference_tensors = load_reference(source, self.options, self.tokenizer, self._mesh)
        self._reference_weights.back()
        try:
            return batch_logprobs(self.reference, rollouts, self.packing, self.ranks)
        finally:
            self._reference_weights.away(self._reference_tensors)

    def update(self, batch: UpdateBatch, loss: Loss, *, lr: float, step: int, policy_version: int) -> UpdateResult:
        """One step's optimizer updates: see `update_policy`."""
        self._train_mode()
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
            self.ranks,
            lr=lr,
            seed=(self.options.seed, step),
            policy_version=policy_version,
        )

    def supervised_update(self, rollouts: Rollouts, lr: float) -> float:
        """One optimizer step of maximum likelihood; returns the loss."""
        self._train_mode()
        return supervised_update(self.policy, self.optimizer, rollouts, self.packing, self.ranks, lr=lr)

    def reset_optimizer(self) -> None:
        """Forget the moments, as if no update had been made."""
        self._moments.back()
        self.optimizer.reset()

    def _train_mode(self) -> None:
        self.policy.model.train(self.checkpointing)  # transformers checkpoints activations in training mode only
