"""Rollouts and their rewards: each response is scored as soon as it ends, while others are still being written."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tandem.algorithm.overlong import overlong_penalty
from tandem.batch import Drawn, Prompt, Response, Rewards, Rollouts, with_contrast
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.reward import RewardConfig
from tandem.data.prompts import Prompts
from tandem.errors import RewardError
from tandem.hybrid.rollout_phase import RolloutPhase
from tandem.rewards.pool import RewardPool, start_rewards
from tandem.rewards.sample import Sample, Score
from tandem.rollout.options import SamplingOptions


def collect(
    engine: RolloutPhase,
    prompts: Prompts | Sequence[Prompt],
    reward_fn: RewardPool,
    options: SamplingOptions,
    algorithm: AlgorithmConfig | None = None,
    reward: RewardConfig | None = None,
) -> tuple[Rollouts, Rewards]:
    """Answer the prompts and score the answers, both at the same time.

    With `idle_groups=resample` groups whose rewards are all equal are put aside, and further batches are drawn until
    as many groups with contrast have come together as a batch has prompts, at most `max_resample` batches in all. The
    first ones in the order of the draws are kept. Where there are fewer, the step goes on with those; where there is
    none, with the first batch as it is. What counts is the reward as the function gave it, before the price of length.

    Args:
        engine: Of an open rollout phase.
        prompts: One batch; or the stream to draw it from.
        reward_fn: Scores in its own processes.
        options: How to sample; see `RolloutPhase.options`.
        algorithm: `idle_groups`, `max_resample` and `mask_truncated` matter here, and `advantage=remax`, for which
            the greedy response to each prompt is written and scored, too. None = just one batch.
        reward: `overlong_buffer` and `overlong_penalty`: what long responses lose. None = nothing.

    Returns:
        What is learnt from. Where that is less than what was drawn, or the rewards are not those that the function
        gave, `Rewards.drawn` has everything as it was. A response whose greedy baseline has no reward is not valid.

    Raises:
        ValueError: To resample, there must be a stream of prompts.

    Source:
        DAPO (arXiv:2503.14476), 3.2 and 3.4; ReMax (arXiv:2310.10505), algorithm 1.
    """
    algorithm, reward = algorithm or AlgorithmConfig(), reward or RewardConfig()
    resample = algorithm.idle_groups == "resample"
    batches = _draw(engine, prompts, reward_fn, options, algorithm)
    groups, wanted = [group for batch in batches for group in batch], len(batches[0])
    active = [group for group in groups if group.has_contrast(algorithm.mask_truncated)] if resample else groups
    kept = active[:wanted] or groups[:wanted]
    rollouts, rewards = _assembled(engine, kept, options)
    if not resample and reward.overlong_buffer == 0:
        return rollouts, rewards
    drawn = Drawn(
        *((rollouts, rewards) if len(kept) == len(groups) else _assembled(engine, groups, options)),
        num_batches=len(batches),
        num_idle=len(groups) - max(len(active), len(kept)),
        num_surplus=max(0, len(active) - wanted),
        num_missing=max(0, wanted - len(active)),
    )
    return rollouts, replace(_shaped(rewards, rollouts, kept, options, reward), drawn=drawn)


@dataclass(frozen=True)
class _Group:
    """A prompt, its responses and their scores; `baseline` is the greedy response to it, with its score."""

    prompt: Prompt
    responses: Sequence[Response]
    scores: Sequence[Score]
    baseline: tuple[Response, Score] | None

    def has_contrast(self, mask_truncated: bool) -> bool:
        """Whether rewards differ, in float32 as advantages see them, among the responses that can be learnt from."""
        rewards = as_rewards(self.scores)
        in_loss = [
            bool(response.tokens) and not (mask_truncated and response.is_truncated) for response in self.responses
        ]
        one_group = torch.zeros(len(in_loss), dtype=torch.int64)
        return bool(with_contrast(rewards.values, rewards.valid & torch.tensor(in_loss), one_group, 1))


def _draw(
    engine: RolloutPhase,
    prompts: Prompts | Sequence[Prompt],
    reward_fn: RewardPool,
    options: SamplingOptions,
    algorithm: AlgorithmConfig,
) -> list[list[_Group]]:
    """One batch of groups; to resample, as many as it takes until the groups with contrast fill one, within bounds."""
    resample = algorithm.idle_groups == "resample"
    if resample and not isinstance(prompts, Prompts):
        raise ValueError("idle_groups=resample draws more prompts: give the stream (Prompts), not one batch of it")
    batches: list[list[_Group]] = []
    num_active = 0
    for _ in range(algorithm.max_resample if resample else 1):
        batch = prompts.next_batch() if isinstance(prompts, Prompts) else prompts
        groups = _answer(engine, batch, reward_fn, options, greedy_too=algorithm.advantage == "remax")
        batches.append(groups)
        num_active += sum(group.has_contrast(algorithm.mask_truncated) for group in groups)
        if num_active >= len(batch):
            break
    return batches


def _answer(
    engine: RolloutPhase,
    prompts: Sequence[Prompt],
    reward_fn: RewardPool,
    options: SamplingOptions,
    *,
    greedy_too: bool,
) -> list[_Group]:
    """One batch, answered and scored."""
    sampled = _submit(engine, prompts, reward_fn, options)
    greedy = _submit(engine, prompts, reward_fn, replace(options, n=1, temperature=0.0)) if greedy_too else []
    with engine.timing("reward"):  # what is left to wait for
        scores = reward_fn.gather([ticket for _, ticket in (*sampled, *greedy)])
    baselines = [(response, score) for (response, _), score in zip(greedy, scores[len(sampled) :], strict=True)]
    groups = []
    for number, prompt in enumerate(prompts):
        rows = slice(number * options.n, (number + 1) * options.n)
        responses = [response for response, _ in sampled[rows]]
        groups.append(_Group(prompt, responses, scores[rows], baselines[number] if greedy_too else None))
    return groups


def _submit(
    engine: RolloutPhase, prompts: Sequence[Prompt], reward_fn: RewardPool, options: SamplingOptions
) -> list[tuple[Response, int]]:
    """The responses to a batch in their order, each with the ticket of its score."""
    tickets = []
    for response in engine.stream(prompts, options):
        tickets.append((response, reward_fn.submit(_sample(prompts[response.group], response.text))))
    return sorted(tickets, key=lambda item: (item[0].group, item[0].index))


def _assembled(engine: RolloutPhase, groups: Sequence[_Group], options: SamplingOptions) -> tuple[Rollouts, Rewards]:
    """Groups side by side, with the rewards that the function gave."""
    responses = [replace(response, group=number) for number, group in enumerate(groups) for response in group.responses]
    rollouts = engine.as_rollouts([group.prompt for group in groups], responses, options)
    rewards = as_rewards([score for group in groups for score in group.scores])
    baselines = [group.baseline[1] for group in groups if group.baseline is not None]
    return rollouts, _with_baselines(rewards, rollouts, as_rewards(baselines)) if baselines else rewards


def _with_baselines(rewards: Rewards, rollouts: Rollouts, baselines: Rewards) -> Rewards:
    """`baselines` has one reward for each group. Without it nothing can be learnt from the group."""
    valid = rewards.valid & baselines.valid[rollouts.group_ids]
    problems = dict(rewards.problems)
    for row in (rewards.valid & ~valid).nonzero().flatten().tolist():
        problem = baselines.problems[int(rollouts.group_ids[row])]
        problems[row] = f"the greedy response to the same prompt, to compare it with, has no reward: {problem}"
    return replace(
        rewards,
        values=torch.where(valid, rewards.values, 0.0),
        valid=valid,
        problems=problems,
        baselines=torch.where(baselines.valid, baselines.values, math.nan)[rollouts.group_ids],
    )


def _shaped(
    rewards: Rewards, rollouts: Rollouts, groups: Sequence[_Group], options: SamplingOptions, config: RewardConfig
) -> Rewards:
    """Less reward for long responses, greedy ones included."""

    def lost(lengths: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        return overlong_penalty(
            lengths,
            max_length=options.max_response_length,
            buffer=config.overlong_buffer,
            penalty=config.overlong_penalty,
        )

    values = torch.where(rewards.valid, rewards.values - lost(rollouts.response_lengths), 0.0)
    if rewards.baselines is None:
        return replace(rewards, values=values)
    lengths = torch.tensor([len(group.baseline[0].tokens) for group in groups if group.baseline is not None])
    return replace(rewards, values=values, baselines=rewards.baselines - lost(lengths)[rollouts.group_ids])


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
    extra: dict[str, dict[int, float]] = {}
    for row, item in enumerate(scores):
        for name, value in item.metrics.items():
            extra.setdefault(name.removeprefix("reward/"), {})[row] = value  # the run's metrics put it back
    return Rewards(
        values=torch.where(valid, values, 0.0).float(),
        valid=valid,
        problems=problems,
        metrics={name: sum(numbers.values()) / len(numbers) for name, numbers in sorted(extra.items())},
        components={name: _column(numbers, len(scores)) for name, numbers in sorted(extra.items())},
    )


def _column(numbers: Mapping[int, float], num_rows: int) -> Float[Tensor, " B"]:
    """Numbers by row; NaN in rows without one, or with one beyond float32."""
    column = torch.tensor([numbers.get(row, math.nan) for row in range(num_rows)], dtype=torch.float64).float()
    return torch.where(column.isfinite(), column, math.nan)


def _sample(prompt: Prompt, response: str) -> Sample:
    return Sample(
        response=response,
        prompt=prompt.text,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
    )
