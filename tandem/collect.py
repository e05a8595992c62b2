"""Rollouts and their rewards: each response is scored as soon as it ends, while others are still being written."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from tandem.batch import Prompt, Response, Rewards, Rollouts
from tandem.config.reward import RewardConfig
from tandem.errors import RewardError
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


def score(
    reward: Callable[..., object],
    rollouts: Rollouts,
    *,
    options: Mapping[str, object] | None = None,
    batched: bool = False,
    workers: int = 2,
    concurrency: int = 32,
    timeout_s: float = 10.0,
) -> Rewards:
    """Score rollouts with any function, in worker processes that can be killed.

    Args:
        reward: Called by keyword with those of `response` (also `solution_str`, `completion`), `prompt`,
            `ground_truth`, `data_source`, `extra_info` that it asks for; or with (response, ground_truth).
        rollouts: What to score.
        options: Keyword arguments handed to the function.
        batched: It takes lists and returns a list.
        workers: Processes.
        concurrency: Calls of an async function in flight at once, over all workers.
        timeout_s: After so many seconds of its own a call is given up, and its response has no reward.

    Warns:
        UserWarning: Some responses have no reward; with their number and the first problem.

    Raises:
        RewardError: The function's signature is none of these, or no response at all has a reward.
    """
    config = RewardConfig(
        options=dict(options or {}), batched=batched, workers=workers, concurrency=concurrency, timeout_s=timeout_s
    )
    with start_rewards(config, reward) as pool:
        tickets = [pool.submit(_sample(rollouts.prompt_of(row), rollouts.texts[row])) for row in range(len(rollouts))]
        rewards = as_rewards(pool.gather(tickets))
    if rewards.num_invalid:
        message = f"{rewards.num_invalid} of {len(rollouts)} responses have no reward; the first: "
        message += rewards.problems[min(rewards.problems)]
        if rewards.num_invalid == len(rollouts):
            raise RewardError(message, remedy="mend the reward function")
        warnings.warn(message, stacklevel=2)
    return rewards


def as_rewards(scores: Sequence[Score]) -> Rewards:
    """Scores as tensors; what has no value is marked, never 0."""
    values = torch.tensor([math.nan if item.value is None else item.value for item in scores], dtype=torch.float64)
    valid = values.float().isfinite()
    problems = {row: item.problem for row, item in enumerate(scores) if item.problem is not None}
    for row in (~valid).nonzero().flatten().tolist():
        problems.setdefault(row, f"the reward {scores[row].value} is too large: float32 ends at 3.4e38")
    extra: dict[str, list[float]] = {}
    for item in scores:
        for name, value in item.metrics.items():
            extra.setdefault(name.removeprefix("reward/"), []).append(value)  # the run's metrics put it back
    return Rewards(
        values=torch.where(valid, values, 0.0).float(),
        valid=valid,
        problems=problems,
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
