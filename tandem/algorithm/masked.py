"""Sums and means over the tokens in the loss, with denominators that are global.

Every way to aggregate token losses into one loss is a weighted sum, `sum over t of w_t * l_t`. The weights follow from
the masks alone, so they are computed once for a whole mini-batch, before it is cut into micro-batches or spread over
ranks. The losses of the pieces then just add up, and the gradient does not depend on how the batch was cut.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "token_sum", "sequence_sum", "constant"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def token_weights(
    aggregation: Aggregation,
    response_mask: Bool[Tensor, "B L"],
    *,
    constant: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B L"]:
    """Weight of each token's loss in the loss of a mini-batch.

    With N tokens in the loss, R responses that have any, and T_i of them in response i, a token weighs

        token_mean      1 / N           all tokens count the same (DAPO)                  verl: token-mean
        sequence_mean   1 / (R * T_i)   all responses count the same (GRPO)               verl: seq-mean-token-mean
        token_sum       1                                                                 verl: token-sum
        sequence_sum    1 / R                                                             verl: seq-mean-token-sum
        constant        1 / (R * constant)   no bias towards short responses (Dr. GRPO)   verl: seq-mean-token-sum-norm

    A response without tokens in the loss (masked because it was cut off, for one) is in no denominator.

    Args:
        aggregation: One of the five names above.
        response_mask: True on tokens that enter the loss, of the WHOLE mini-batch.
        constant: For `constant` only: a number of tokens that is the same for every batch, such as the longest response
            allowed.
        dtype: Of the result. The weights are computed in float64.

    Returns:
        The weights; 0 outside of the mask, and 0 everywhere if no token is in the loss.

    Raises:
        ValueError: An unknown name, or `constant` without a positive number.

    Source:
        DeepSeekMath (arXiv:2402.03300), equation 3; Dr. GRPO (arXiv:2503.20783), 3.2; DAPO (arXiv:2503.14476), 3.3.
    """
    check_aggregation(aggregation, constant)
    lengths = response_mask.sum(dim=1, keepdim=True).double()
    num_responses = (lengths > 0).sum().double()
    denominators = {
        "token_mean": lengths.sum(),
        "sequence_mean": num_responses * lengths,
        "token_sum": torch.ones_like(num_responses),
        "sequence_sum": num_responses,
        "constant": num_responses * (constant or 1),
    }
    return torch.where(response_mask, 1.0 / denominators[aggregation], 0.0).to(dtype)


def check_aggregation(aggregation: str, constant: int | None) -> None:
    """Raise ValueError unless `token_weights` can work with these two."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {aggregation!r}; choose one of {', '.join(AGGREGATIONS)}")
    if aggregation == "constant" and (constant is None or not constant > 0):
        raise ValueError(
            f"loss aggregation 'constant' needs a positive number of tokens to divide by, got {constant!r}; "
            "the usual choice is the longest response allowed"
        )


def masked_sum(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Sum of the values where `mask` is True, over `dim` or over everything.

    What stands outside of the mask, NaN and infinities included, reaches neither the sum nor the gradient. (Multiplying
    by the mask would let it through: NaN * 0 is NaN.)
    """
    return torch.where(mask, values, 0.0).sum(dim=dim)


def masked_mean(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Mean of the values where `mask` is True, over `dim` or over everything; 0 where it is True nowhere."""
    return masked_sum(values, mask, dim) / mask.sum(dim=dim).clamp(min=1)
