"""A transformers model as the trainer runs it: packed rows, cut into micro-batches for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.batch import Rollouts
from tandem.model.forward import body_dtype as weights_dtype
from tandem.model.forward import hidden_states
from tandem.model.precision import head_parameters
from tandem.model.ranks import ALONE, Ranks
from tandem.trainer.balance import rank_micro_batches
from tandem.trainer.packing import Costs, PackedRow, PackingOptions, pack


class PackedModel(nn.Module):
    """What policy and critic have in common: everything but what their heads compute.

    Args:
        model: With Tandem's attention.
        body_dtype: What the layers compute in. None = what their weights are in.
    """

    def __init__(self, model: PreTrainedModel, *, body_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.body_dtype = body_dtype or weights_dtype(model)

    def hidden(self, row: PackedRow) -> Float[Tensor, "N D"]:
        """The state in which each response token of the row was chosen: after all that comes before it."""
        hidden = hidden_states(self.model, row.tokens, row.positions, row.spans, dtype=self.body_dtype)
        return hidden[0].index_select(0, row.index)

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
        head = sum(parameter.numel() for parameter in head_parameters(self.model))
        return Costs(
            per_token=2.0 * max(body, 1),
            per_pair=4.0 * config.num_hidden_layers * float(config.hidden_size),
            per_target=2.0 * head,
        )
