"""Rollouts and their rewards: each response is scored as soon as it ends, while others are still being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tandem.batch import Prompt, Response, Rewards, Rollouts
from tandem.config.reward import RewardConfig
from tandem.hybrid.rollout_phase import RolloutPhase
from tandem.rewards.pool import RewardPool, start_rewards
from tandem.rewards.sample import Sample, Score
from tandem.rollout.options import SamplingOptions


def collect(
    engine: RolloutPhase, prompts: Sequence[Prompt], reward_fn: RewardPool, options: SamplingOptions
) -> tuple[Rollouts, Rewards]:
    """Answer the prompts and score the answers, both at the same time.

    Args:
        engine: Of an open rollout phase.
        prompts: One batch.
        reward_fn: Scores in its own processes.
        options: How to sample; see `RolloutPhase.options`.
    """
    tickets: dict[tuple[int, int], int] = {}
    responses: list[Response] = []
    for response in engine.stream(prompts, options):
        responses.append(response)
        tickets[response.group, response.index] = reward_fn.submit(_sample(prompts[response.group], response.text))
    rollouts = engine.as_rollouts(prompts, responses, options)
    with engine.timing("reward"):  # what is left to wait for
        scores = reward_fn.gather([tickets[key] for key in sorted(tickets)])
    return rollouts, as_rewards(scores)


def score(reward: Callable[..., object], rollouts: Rollouts, *, workers: int = 2, timeout_s: float = 10.0) -> Rewards:
    """Score rollouts with any function, in worker processes that can be killed.

    Args:
        reward: Called by keyword with those of `response` (also `solution_str`, `completion`), `prompt`,
            `ground_truth`, `data_source`, `extra_info` that it asks for; or with (response, ground_truth).
        rollouts: What to score.
        workers: Processes.
        timeout_s: After so many seconds of its own a call is given up, and its response has no reward.

    Raises:
        RewardError: The function's signature is none of these.
    """
    with start_rewards(RewardConfig(workers=workers, timeout_s=timeout_s), reward) as pool:
        tickets = [pool.submit(_sample(rollouts.prompt_of(row), rollouts.texts[row])) for row in range(len(rollouts))]
        return as_rewards(pool.gather(tickets))


def as_rewards(scores: Sequence[Score]) -> Rewards:
    """Scores as tensors; what has no value is marked, never 0."""
    values = [score.value for score in scores]
    extra: dict[str, list[float]] = {}
    for item in scores:
        for name, value in item.metrics.items():
            extra.setdefault(name.removeprefix("reward/"), []).append(value)  # the run's metrics put it back
    return Rewards(
        values=torch.tensor([0.0 if value is None else value for value in values], dtype=torch.float32),
        valid=torch.tensor([value is not None for value in values], dtype=torch.bool),
        problems={row: item.problem for row, item in enumerate(scores) if item.problem is not None},
        metrics={name: sum(numbers) / len(numbers) for name, numbers in sorted(extra.items())},
    )


def _sample(prompt: Prompt, response: str) -> Sample:
    return Sample(
        response=response,
        prompt=prompt.text,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
    )
