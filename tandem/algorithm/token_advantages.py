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
    tokens_so_far = response_mask.cumsum(1, dtype=torch.int32)  # this one included
    is_last = response_mask & (tokens_so_far == response_mask.sum(1, keepdim=True))
    placed = torch.where(is_last, rewards[:, None].double(), 0.0)
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
    values = torch.where(response_mask, values.detach().double(), 0.0)
    if gamma == lam == 1.0:  # the values in between cancel out
        returns = torch.where(response_mask, _rewards_to_go(rewards, response_mask), 0.0)
        return returns - values, returns
    # Token by token from the last; transposed, since those of one t then lie side by side in memory.
    mask, value = response_mask.t().contiguous(), values.t().contiguous()
    advantage = torch.where(mask, rewards.detach().double().t(), 0.0).contiguous()  # for now the rewards
    next_value = next_advantage = values.new_zeros(len(values))
    for t in reversed(range(len(mask))):
        delta = advantage[t] + gamma * next_value - value[t]
        next_advantage = torch.where(mask[t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask[t], value[t], next_value)
        advantage[t] = next_advantage
    advantages = torch.where(response_mask, advantage.t(), 0.0).contiguous()
    return advantages, advantages + values


def _rewards_to_go(rewards: Float[Tensor, "B L"], response_mask: Bool[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """r_t + r_{t+1} + ..., over the tokens of the mask."""
    return torch.where(response_mask, rewards.detach().double(), 0.0).flip(1).cumsum(1).flip(1)


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
    known = response_mask & baselines.isfinite()[:, None]
    return torch.where(
        known, _rewards_to_go(rewards, response_mask) - baselines.detach().double()[:, None], 0.0
    ).float()
