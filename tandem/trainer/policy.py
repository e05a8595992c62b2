"""The policy as the trainer runs it: the model's body on a packed row, then the head in chunks."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from typing_extensions import override

from tandem.algorithm.categorical import selected_logprobs_and_entropy
from tandem.model.forward import head_logits
from tandem.trainer.packed_model import PackedModel
from tandem.trainer.packing import PackedRow


class Policy(PackedModel):
    """An unmodified transformers model, asked for log-probs of given tokens instead of for logits.

    Args:
        model: A causal language model with Tandem's attention.
        chunk_tokens: Tokens whose logits are in memory at once, forward and backward.
        body_dtype: What the layers compute in. None = what their weights are in.
    """

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int, body_dtype: torch.dtype | None = None) -> None:
        super().__init__(model, body_dtype=body_dtype)
        self.chunk_tokens = chunk_tokens

    @override
    def forward(
        self, row: PackedRow, *, temperature: float, entropy_gradient: bool
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Log-prob of each target, and entropy of the distribution it was drawn from; float32, at `temperature`."""
        hidden = self.hidden(row)
        if len(row.targets) <= self.chunk_tokens:  # one chunk: its logits are within the bound, nothing to run again
            return self._head(hidden, row.targets, temperature, entropy_gradient)
        pieces = [
            checkpoint(
                self._head, piece, targets, temperature, entropy_gradient, use_reentrant=False, preserve_rng_state=False
            )
            for piece, targets in zip(
                hidden.split(self.chunk_tokens), row.targets.split(self.chunk_tokens), strict=True
            )
        ]
        return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logits = head_logits(self.model, hidden)
        return selected_logprobs_and_entropy(
            logits, targets, temperature=temperature, entropy_gradient=entropy_gradient
        )
