"""Maximum likelihood on given answers, with the machinery of the policy update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tandem.batch import Prompt, Response, Rollouts
from tandem.model.ranks import ALONE, Ranks
from tandem.trainer.optim import Optimizer
from tandem.trainer.packing import PackingOptions
from tandem.trainer.policy import Policy


def answers_as_rollouts(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Rollouts:
    """Given answers in the place of responses: groups of one, at temperature 1.

    Args:
        prompts: Token ids.
        answers: Token ids, ending with EOS.

    Raises:
        ValueError: Not one answer for each prompt, or one without a token.
    """
    if len(prompts) != len(answers) or not all(map(len, prompts)) or not all(map(len, answers)):
        raise ValueError("each prompt needs one answer, and each of them a token at least")
    return Rollouts.from_responses(
        [Prompt(tokens=tuple(tokens), text="") for tokens in prompts],
        [
            Response(row, 0, tuple(tokens), logprobs=(0.0,) * len(tokens), text="", finish_reason="stop")
            for row, tokens in enumerate(answers)
        ],
    )


def supervised_update(
    policy: Policy,
    optimizer: Optimizer,
    rollouts: Rollouts,
    packing: PackingOptions,
    ranks: Ranks = ALONE,
    *,
    lr: float,
) -> float:
    """One optimizer step on the mean negative log-prob of all response tokens; returns that mean.

    Each of `ranks` runs some of the rows, as in `update_policy`.
    """
    num_tokens = int(rollouts.response_mask.sum())
    total = torch.zeros((), dtype=torch.float64, device=policy.device)
    with optimizer.weights.collecting():
        for _, row in policy.packed(rollouts, range(len(rollouts)), packing, ranks):
            logprobs, _ = policy(row, temperature=1.0, entropy_gradient=False)
            loss = -logprobs.sum() / num_tokens
            loss.backward()
            total += loss.detach().double()
        value = float(ranks.sum(total))
        optimizer.step(lr, loss_is_finite=math.isfinite(value))
    return value
