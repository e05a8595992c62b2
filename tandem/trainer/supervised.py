"""Maximum likelihood on given answers, with the machinery of the policy update."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.batch import Prompt, Response, Rollouts
from tandem.trainer.optim import Optimizer
from tandem.trainer.packing import PackingOptions
from tandem.trainer.policy import Policy


@dataclass(frozen=True)
class Examples:
    """Prompts with the answers to learn, as token ids; an answer ends with EOS."""

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]


def as_rollouts(examples: Examples) -> Rollouts:
    """Answers in the place of responses: groups of one, at temperature 1."""
    prompts = [Prompt(tokens=tokens, text="") for tokens in examples.prompts]
    answers = [
        Response(group=row, index=0, tokens=tokens, logprobs=(0.0,) * len(tokens), text="", finish_reason="stop")
        for row, tokens in enumerate(examples.answers)
    ]
    return Rollouts.from_responses(prompts, answers)


def supervised_update(
    policy: Policy, optimizer: Optimizer, examples: Examples, packing: PackingOptions, *, lr: float
) -> float:
    """One optimizer step on the mean negative log-prob of all answer tokens; returns that mean."""
    rollouts = as_rollouts(examples)
    num_tokens = int(rollouts.response_mask.sum())
    total = torch.zeros((), dtype=torch.float64)
    with optimizer.accumulating():
        for _, row in policy.packed(rollouts, range(len(rollouts)), packing):
            logprobs, _ = policy(row, temperature=1.0, entropy_gradient=False)
            loss = -logprobs.sum() / num_tokens
            loss.backward()
            total += loss.detach().double().cpu()
        optimizer.step(lr, loss_is_finite=bool(torch.isfinite(total)))
    return float(total)
