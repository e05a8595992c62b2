"""The policy as the trainer runs it: the model's body on a packed row, then the head in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from typing_extensions import override

from tandem.algorithm.categorical import selected_logprobs_and_entropy
from tandem.batch import Rollouts
from tandem.model.forward import body_dtype as weights_dtype
from tandem.model.forward import head_logits, hidden_states
from tandem.model.ranks import ALONE, Ranks
from tandem.trainer.balance import rank_micro_batches
from tandem.trainer.packing import Costs, PackedRow, PackingOptions, pack


class Policy(nn.Module):
    """An unmodified transformers model, asked for log-probs of given tokens instead of for logits.

    Args:
        model: A causal language model with Tandem's attention.
        chunk_tokens: Tokens whose logits are in memory at once, forward and backward.
        body_dtype: What the layers compute in. None = what their weights are in.
    """

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int, body_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.body_dtype = body_dtype or weights_dtype(model)

    @override
    def forward(
        self, row: PackedRow, *, temperature: float, entropy_gradient: bool
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Log-prob of each target, and entropy of the distribution it was drawn from; float32, at `temperature`."""
        hidden = hidden_states(self.model, row.tokens, row.positions, row.spans, dtype=self.body_dtype)
        hidden = hidden[0].index_select(0, row.index)
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

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def packed(
        self, rollouts: Rollouts, rows: Sequence[int], options: PackingOptions, ranks: Ranks = ALONE
    ) -> Iterator[tuple[list[int], PackedRow]]:
        """This rank's micro-batches of these rows: which each has, and how they lie side by side.

        All ranks have the same number of them. One without rows must be run as well, for the others to get on.
        """
        costs = self.costs()
        for part in rank_micro_batches(rollouts, rows, options, costs, ranks):
            yield part, pack(rollouts, part, packing=options.packing, costs=costs, device=self.device)

    def costs(self) -> Costs:
        """Forward operations, to plan by: 2 per weight and token, 4 per pair and channel."""
        config = self.model.config
        embedding = sum(parameter.numel() for parameter in self.model.get_input_embeddings().parameters())
        body = sum(parameter.numel() for parameter in self.model.base_model.parameters()) - embedding
        return Costs(
            per_token=2.0 * max(body, 1),
            per_pair=4.0 * config.num_hidden_layers * float(config.hidden_size),
            per_target=2.0 * embedding,  # the head has its shape
        )
