"""DPPO: a token stops counting when the policy has moved too far on it, by divergence instead of by ratio.

    loss of a token = -sg(min(ratio, max_weight)) * A * logprobs,      sg = without gradient
    and 0 where the ratio has moved in A's direction and D(policy, old policy) > bound

D looks at two outcomes, the sampled token (p, before q) or any other one:

    binary_tv    |p - q|
    binary_kl    q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    from dppo import binary_kl, dppo

    td.train(config, loss=dppo)                                                           # bound 0.15
    td.train(config, loss=functools.partial(dppo, divergence=binary_kl, low=0.05, high=0.05))

A rare token may so change its ratio a lot, a likely one its probability only a little. The paper measures the distance
to the policy that the engine sampled from: `algorithm.old_logprobs=rollout`.

Source:
    Rethinking the Trust Region in LLM Reinforcement Learning (arXiv:2602.04879).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def binary_tv(p: Tensor, q: Tensor) -> Tensor:
    """Total variation."""
    return (p - q).abs()


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL divergence of the policy from the old one. NaN, which is above no bound, where p = q = 1."""
    return torch.xlogy(q, q / p) + torch.xlogy(1.0 - q, (1.0 - q) / (1.0 - p))


def dppo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    divergence: Callable[[Tensor, Tensor], Tensor] = binary_tv,
    low: float = 0.15,
    high: float = 0.15,
    max_weight: float = 20.0,
    **_: object,
) -> Tensor:
    """Token losses [b, L]; `low` and `high` are the bounds for A < 0 and A > 0."""
    p, q = logprobs.detach().exp(), old_logprobs.exp()
    away = torch.where(advantages > 0, p > q, p < q)
    outside = away & (divergence(p, q) > torch.where(advantages > 0, high, low))
    weight = (logprobs.detach() - old_logprobs).exp().clamp(max=max_weight)
    return torch.where(outside, 0.0, -weight * advantages * logprobs)
