"""Log-probs and entropy of next-token distributions, from logits."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def selected_logprobs_and_entropy(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = True,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-prob of one chosen token, and the entropy, of each distribution softmax(logits / temperature).

    Args:
        logits: One row per position. A logit of -inf is a token of probability 0.
        targets: The chosen token of each row, 0 .. V-1.
        temperature: Divides the logits, so that both results belong to the distribution that was sampled from.
        entropy_gradient: False where the entropy is only reported: its backward pass is then saved.

    Returns:
        Log-probs and entropies in nats, in float32 (float64 for float64 logits), whatever the logits' own precision.

    Raises:
        ValueError: The temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive to give a distribution, got {temperature!r}")
    precise = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        precise = precise / temperature
    all_logprobs = torch.log_softmax(precise, dim=-1)
    logprobs = all_logprobs.gather(-1, targets[:, None]).squeeze(-1)
    return logprobs, _entropy(all_logprobs if entropy_gradient else all_logprobs.detach())


def _entropy(logprobs: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    # Where p = 0, p log p is 0 by its limit, but 0 * -inf is NaN; the log is replaced before the product, so that the
    # gradient is finite too.
    # A product over rows, not an elementwise one and a sum: these are the largest tensors of a training step.
    return -torch.linalg.vecdot(logprobs.exp(), torch.where(logprobs == -torch.inf, 0.0, logprobs))
