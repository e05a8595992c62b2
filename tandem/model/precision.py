"""What a model's weights are computed with: the head in a dtype of its own, everything else in the body's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.model.forward import value_head


def head_parameters(model: PreTrainedModel) -> set[nn.Parameter]:
    """Those of the output embeddings, or of a value head. Where both embeddings are one tensor, it is the head's."""
    head = model.get_output_embeddings() or value_head(model)
    return set() if head is None else set(head.parameters())


def round_weights(
    model: PreTrainedModel, *, body_dtype: torch.dtype, head_dtype: torch.dtype, frozen_only: bool = False
) -> dict[str, Tensor]:
    """Change the parameters of a float32 model to what it computes in, in place.

    Args:
        model: Loaded in float32, or a `skeleton`.
        body_dtype: Of everything but the head.
        head_dtype: Of the output embeddings, and of the input embeddings where both are one tensor.
        frozen_only: Leave those alone that need gradients.

    Returns:
        By name, the float32 tensors that were replaced and need gradients. They are free once nobody keeps them.
    """
    of_head = head_parameters(model)
    originals: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        dtype = head_dtype if parameter in of_head else body_dtype
        if dtype == torch.float32 or (frozen_only and parameter.requires_grad):
            continue
        if parameter.requires_grad:
            originals[name] = parameter.detach()
        parameter.data = parameter.data.to(dtype)
    return originals
