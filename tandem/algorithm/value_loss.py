"""The loss of a critic: squared distance of its values to returns, bounded to what one step may change."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class TokenValueLoss(NamedTuple):
    """Loss of each token, and where the bound acted (without gradient)."""

    loss: Float[Tensor, "*shape"]
    clipped: Bool[Tensor, "*shape"]


def clipped_value_loss(
    values: Float[Tensor, "*shape"],
    old_values: Float[Tensor, "*shape"],
    returns: Float[Tensor, "*shape"],
    *,
    clip: float | None = None,
) -> TokenValueLoss:
    """The loss of each token's value.

    loss = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2

    So a value that has moved towards its return by more than c gets no gradient any more; one that is further from its
    return than the clipped value would be, keeps it.

    Args:
        values: Of the states in which the tokens were chosen, with gradient.
        old_values: The same before the step's first update: those that the advantages were computed from.
        returns: What the values shall be, in the reward's unit. No gradient flows into them.
        clip: The c above, in the reward's unit, more than 0. None = no bound.

    Source:
        arXiv:2005.12729, 3, value function clipping: in OpenAI Baselines' PPO, not in the paper on PPO.
    """
    old_values, returns = old_values.detach(), returns.detach()
    squared_error = (values - returns).square()
    if clip is None:
        return TokenValueLoss(0.5 * squared_error, torch.zeros_like(squared_error, dtype=torch.bool))
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return TokenValueLoss(0.5 * torch.maximum(squared_error, bounded), bounded.detach() > squared_error.detach())


def explained_variance(
    values: Float[Tensor, "*shape"], returns: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> float:
    """Which share of the returns' variance the values account for, over the tokens in `mask`.

    1 - Var(R - V) / Var(R)

    1 = they are the returns, up to a constant; 0 = no better than a constant; below 0 = worse than one.

    Returns:
        NaN where the returns are all equal: there is nothing to explain.
    """
    inside, wanted = values[mask].double(), returns[mask].double()
    if wanted.numel() == 0 or bool((wanted == wanted[0]).all()):
        return float("nan")
    return 1.0 - float((wanted - inside).var(correction=0) / wanted.var(correction=0))
