"""Advantages of tokens: what comes after a token, compared with what was expected.

The reward of a response stands on its last token. Tokens outside of the response mask (those of a tool, say) are no
steps of the policy: the sums over what comes later go past them, without a discount.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tandem.algorithm.whitening import whiten


def token_rewards(
    rewards: Float[Tensor, " B"],
    response_mask: Bool[Tensor, "B L"],
    penalty: Float[Tensor, "B L"] | None = None,
) -> Float[Tensor, "B L"]:
    """Rewards of tokens: the response's on its last token, minus a penalty on each.

    Args:
        rewards: Reward of each response.
        response_mask: True on the tokens that enter the loss; a response without any has no reward here.
        penalty: Such as kl_coef * KL. What stands outside of the mask has no effect.

    Returns:
        float64, 0 outside of the mask.
    """
    tokens_left = response_mask.flip(1).cumsum(1).flip(1)  # this one included
    placed = torch.where(response_mask & (tokens_left == 1), rewards[:, None].double(), 0.0)
    return placed if penalty is None else placed - torch.where(response_mask, penalty.double(), 0.0)


def gae(
    rewards: Float[Tensor, "B L"],
    values: Float[Tensor, "B L"],
    response_mask: Bool[Tensor, "B L"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float[Tensor, "B L"], Float[Tensor, "B L"]]:
    """Generalised advantage estimates, and the returns that a critic learns from.

    delta_t = r_t + gamma * V_{t+1} - V_t
    A_t = delta_t + gamma * lam * A_{t+1}
    R_t = A_t + V_t

    with t counted over the tokens of the mask, and V = A = 0 after the last of them, cut-off responses included.
    lam = 1 is the sum of what came minus the value: unbiased, noisy. lam = 0 trusts the critic's next value. With
    values of 0 and lam = 1, A_t is the discounted sum of the rewards from t on.

    Args:
        rewards: Of each token; see `token_rewards`.
        values: The critic's for the state in which each token was chosen.
        response_mask: True on the tokens that enter the loss. Elsewhere rewards and values, NaN included, have no
            effect.
        gamma: Discount per token, 0 to 1.
        lam: Weight of what was seen against what the critic says, 0 to 1.

    Returns:
        Advantages, not whitened, and returns. float64, no gradient, 0 outside of the mask.

    Source:
        High-dimensional continuous control using generalized advantage estimation (arXiv:1506.02438), equation 16;
        PPO (arXiv:1707.06347), equations 11 and 12.
    """
    rewards = torch.where(response_mask, rewards.detach().double(), 0.0)
    values = torch.where(response_mask, values.detach().double(), 0.0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        own = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(own, delta + gamma * lam * next_advantage, 0.0)
        next_advantage = torch.where(own, advantages[:, t], next_advantage)
        next_value = torch.where(own, values[:, t], next_value)
    return advantages, advantages + values


def gae_advantages(
    rewards: Float[Tensor, "B L"],
    values: Float[Tensor, "B L"],
    response_mask: Bool[Tensor, "B L"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Float[Tensor, "B L"]:
    """PPO's advantages: those of `gae`, whitened over all tokens of the mask. Arguments and source as there.

    Returns:
        float32, no gradient, 0 outside of the mask; exactly 0 where no two tokens' estimates differ.
    """
    return whiten(gae(rewards, values, response_mask, gamma=gamma, lam=lam)[0], response_mask).float()


def reinforce_plus_plus_advantages(
    rewards: Float[Tensor, "B L"], response_mask: Bool[Tensor, "B L"], *, gamma: float = 1.0
) -> Float[Tensor, "B L"]:
    """Score what comes from each token on against the mean of the whole batch. No groups, no critic.

    A_t = whitened over all tokens in the loss (r_t + gamma * r_{t+1} + gamma^2 * r_{t+2} + ...)

    Args:
        rewards: Of each token; see `token_rewards`.
        response_mask: True on the tokens that enter the loss.
        gamma: Discount per token, 0 to 1.

    Returns:
        float32, no gradient, 0 outside of the mask; exactly 0 where no two tokens' sums differ.

    Source:
        REINFORCE++ (arXiv:2501.03262), on REINFORCE++: returns with the KL penalty, and global normalisation.
    """
    return gae_advantages(rewards, torch.zeros_like(rewards), response_mask, gamma=gamma)


def remax_advantages(
    rewards: Float[Tensor, "B L"], response_mask: Bool[Tensor, "B L"], baselines: Float[Tensor, " B"]
) -> Float[Tensor, "B L"]:
    """Score what comes from each token on against the reward of the greedy response to the same prompt.

    A_t = r_t + r_{t+1} + ... - b

    Without a penalty on tokens that is the reward of the response minus b, for each of its tokens.

    Args:
        rewards: Of each token; see `token_rewards`.
        response_mask: True on the tokens that enter the loss.
        baselines: b of each response's prompt. NaN where there is none: such responses get 0.

    Returns:
        float32, no gradient, 0 outside of the mask.

    Source:
        ReMax (arXiv:2310.10505), algorithm 1.
    """
    sums, _ = gae(rewards, torch.zeros_like(rewards), response_mask)
    known = response_mask & baselines.isfinite()[:, None]
    return torch.where(known, sums - baselines.detach().double()[:, None], 0.0).float()
