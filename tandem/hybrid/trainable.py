"""A loaded model with what trains it on this rank: how its rows are cut into micro-batches, and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tandem.hybrid.worker_options import WorkerOptions
from tandem.model.ranks import Ranks
from tandem.trainer.budget import plan_memory
from tandem.trainer.optim import Optimizer
from tandem.trainer.packed_model import PackedModel
from tandem.trainer.packing import PackingOptions
from tandem.trainer.update import UpdateOptions
from tandem.trainer.weights import Weights


class Trainable:
    """As the section `trainer` of the config says.

    Args:
        packed: Policy or critic.
        weights: Its.
        options: Of the worker.
        ranks: Those that train it together.
        lr_key: The config key of its learning rate, for messages.
    """

    def __init__(
        self, packed: PackedModel, weights: Weights, options: WorkerOptions, ranks: Ranks, *, lr_key: str
    ) -> None:
        trainer = options.trainer
        memory = plan_memory(
            packed.model.config,
            dtype=options.dtype,
            device=options.device,
            max_sequence=options.max_sequence,
            micro_batch_tokens=trainer.micro_batch_tokens,
            activation_checkpointing=trainer.activation_checkpointing,
            ranks=ranks,
        )
        self.checkpointing = memory.activation_checkpointing
        if self.checkpointing:
            packed.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model = packed.model
        self.packing = PackingOptions(trainer.packing, memory.micro_batch_tokens)
        self.update_options = UpdateOptions(
            packing=self.packing,
            mini_batch_responses=trainer.mini_batch_responses,
            shuffle=trainer.mini_batch_shuffle,
            epochs=trainer.update_epochs,
        )
        self.optimizer = Optimizer(
            weights,
            betas=trainer.betas,
            weight_decay=trainer.weight_decay,
            max_grad_norm=trainer.max_grad_norm,
            max_skipped=trainer.max_skipped_updates,
            lr_key=lr_key,
        )

    def train_mode(self) -> None:
        """Before an update: transformers checkpoints activations in training mode only."""
        self._model.train(self.checkpointing)

    def moments(self) -> Iterator[Tensor]:
        """The optimizer's state, as far as it has the size of the weights."""
        for state in self.optimizer.adamw.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0)
