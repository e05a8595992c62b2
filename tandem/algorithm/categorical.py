"""Log-probs and entropy of next-token distributions, from logits."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx
from typing_extensions import override


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
    logprobs, entropy = _Categorical.apply(precise, targets, temperature)
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _Categorical(torch.autograd.Function):
    """Both results from one exponential, and a gradient that takes one more matrix: these are the largest tensors of a
    training step.

    The exponentials are summed in float64. A float32 sum over a vocabulary of 50,000 is off by 1e-5 in one direction,
    more than everything else by which the trainer's log-probs differ from the engine's.
    """

    @staticmethod
    @override
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"], temperature: float
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        centred = logits - logits.amax(dim=-1, keepdim=True)
        if temperature != 1.0:
            centred.div_(temperature)
        chosen = centred.gather(-1, targets[:, None]).squeeze(-1).double()
        weights = centred.exp()
        total = weights.sum(dim=-1, dtype=torch.float64)
        # Where p = 0, p log p is 0 by its limit, but 0 * -inf is NaN.
        mean = torch.linalg.vecdot(weights, centred.masked_fill_(centred == -torch.inf, 0.0)).double() / total
        entropy = total.log() - mean
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weights, targets, total, entropy)
        ctx.temperature = temperature  # pyrefly: ignore[missing-attribute]
        return (chosen - total.log()).to(logits.dtype), entropy.to(logits.dtype)

    @staticmethod
    @override
    def backward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, of_logprob: Float[Tensor, " N"] | None, of_entropy: Float[Tensor, " N"] | None
    ) -> tuple[Float[Tensor, "N V"], None, None]:
        """d logprob = [token chosen] - p and d entropy = -p (log p + entropy), over the temperature."""
        weights, targets, total, entropy = ctx.saved_tensors  # pyrefly: ignore[missing-attribute]
        per_row = 1.0 / (total * ctx.temperature)  # pyrefly: ignore[missing-attribute]

        def column(values: Tensor) -> Tensor:
            return values[:, None].to(weights.dtype)

        if of_entropy is None:
            grad = torch.zeros_like(weights)
        else:  # w log w is 0 where w = 0; log p = log w - log total
            grad = torch.special.xlogy(weights, weights).addcmul_(weights, column(entropy - total.log()))
            grad.mul_(column(-of_entropy * per_row))
        if of_logprob is not None:
            grad.addcmul_(weights, column(-of_logprob * per_row))
            grad.scatter_add_(1, targets[:, None], column(of_logprob * per_row * total))
        return grad, None, None
