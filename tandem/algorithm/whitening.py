"""Whitening: numbers on the scale of their own spread."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def whiten(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, eps: float = 1e-8
) -> Float[Tensor, "*shape"]:
    """Shift and scale values to mean 0 and variance 1 over those where `mask` is True.

    w = (v - mean of v) / sqrt(variance of v + eps), with the sample variance (divisor N - 1)

    Args:
        values: What stands outside of the mask, NaN and infinities included, has no effect.
        mask: Which of them count.
        eps: Added to the variance, in the square of the values' unit.

    Returns:
        float64, 0 outside of the mask. Exactly 0 everywhere where no two values differ, one alone included.
    """
    kept = values[mask].double()
    whitened = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    if len(kept) > 0 and bool(kept.min() < kept.max()):
        whitened[mask] = (kept - kept.mean()) / (kept.var() + eps).sqrt()
    return whitened
