"""From logits and one uniform number to a token and its log-prob.

The draw inverts the cumulative distribution. A float32 running sum over a large vocabulary would lose every token
smaller than its rounding error, a float64 one reads twice the memory; so the vocabulary is cut into blocks. Block
sums are accumulated in float64, one block is chosen, and only that block is summed token by token.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tandem.rollout.options import SamplingOptions

BLOCK = 128  # tokens; blocks x block size is least near the square root of the vocabulary, and powers of two sum fast


def draw(
    logits: Float[Tensor, "S V"], uniform: Float64[Tensor, " S"], options: SamplingOptions
) -> tuple[Int64[Tensor, " S"], Float[Tensor, " S"]]:
    """One token for each row, and its log-prob under softmax(logits / temperature). Overwrites `logits`.

    Args:
        logits: float32.
        uniform: In [0, 1); unused at temperature 0.
        options: Of which temperature, top_k and top_p count here.

    Returns:
        Tokens, never one of probability 0, and float32 log-probs; NaN for a row whose logits are not finite.
    """
    greedy = logits.argmax(dim=-1) if options.temperature == 0.0 else None
    logits.sub_(logits.amax(dim=-1, keepdim=True))  # in place: fresh pages cost as much as the sums
    if greedy is None and options.temperature != 1.0:
        logits.div_(options.temperature)  # after the subtraction, as the trainer does: it rounds less
    weights = logits.exp_()
    block_sums = _block_sums(weights)
    total = block_sums.sum(dim=-1)
    if greedy is not None:
        tokens = greedy
    elif options.top_k is None and options.top_p == 1.0:
        tokens = _invert(weights, block_sums, uniform)
    else:
        allowed = restrict(weights, options.top_k, options.top_p)
        tokens = _invert(allowed, _block_sums(allowed), uniform)
    chosen = weights.gather(1, tokens[:, None])[:, 0].double()
    return tokens, (chosen.log() - total.log()).float()


def restrict(weights: Float[Tensor, "S V"], top_k: int | None, top_p: float) -> Float[Tensor, "S V"]:
    """Weights with 0 for each token outside of top-k and, of what is left, outside of top-p."""
    kept = weights
    if top_k is not None:
        least = weights.topk(min(top_k, weights.shape[1]), dim=-1).values[:, -1:]
        kept = kept.masked_fill(kept < least, 0.0)
    if top_p < 1.0:
        ordered, order = kept.sort(dim=-1, descending=True, stable=True)
        before = ordered.double().cumsum(dim=-1) - ordered  # of the more likely tokens
        outside = before >= top_p * ordered.double().sum(dim=-1, keepdim=True)
        outside[:, 0] = False
        kept = kept.masked_fill(torch.zeros_like(outside).scatter_(1, order, outside), 0.0)
    return kept


def _block_sums(weights: Float[Tensor, "S V"]) -> Float64[Tensor, "S blocks"]:
    """Sums of BLOCK neighbouring weights; the last block may be shorter."""
    whole = weights.shape[1] // BLOCK
    parts = [weights[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).sum(dim=-1)] if whole else []
    if weights.shape[1] % BLOCK:
        parts.append(weights[:, whole * BLOCK :].sum(dim=-1, keepdim=True))
    return torch.cat(parts, dim=1).double()


def _invert(
    weights: Float[Tensor, "S V"], block_sums: Float64[Tensor, "S blocks"], uniform: Float64[Tensor, " S"]
) -> Int64[Tensor, " S"]:
    """The token at which the cumulative weight passes `uniform` times the total."""
    upto = block_sums.cumsum(dim=-1)
    target = uniform[:, None] * upto[:, -1:]
    block = _first_above(upto, target)
    size = block_sums.gather(1, block)
    share = (target - upto.gather(1, block) + size) / size  # of the block's own weight, within [0, 1] up to rounding
    within = torch.arange(min(BLOCK, weights.shape[1]), device=weights.device)
    column = block * BLOCK + within
    inside = weights.gather(1, column.clamp(max=weights.shape[1] - 1)).double()
    inside.masked_fill_(column >= weights.shape[1], 0.0)
    upto = inside.cumsum(dim=-1)
    return (block * BLOCK + _first_above(upto, share * upto[:, -1:]))[:, 0].clamp(max=weights.shape[1] - 1)


def _first_above(upto: Float64[Tensor, "S N"], target: Float64[Tensor, "S 1"]) -> Int64[Tensor, "S 1"]:
    """Index of the first running sum above `target`, so that its own summand is not 0.

    A target that rounding has lifted to the total or beyond gets the last index with a summand.
    """
    last = torch.searchsorted(upto, upto[:, -1:].contiguous()).clamp_(max=upto.shape[1] - 1)  # beyond it if NaN
    return torch.minimum(torch.searchsorted(upto, target.contiguous(), right=True), last)
