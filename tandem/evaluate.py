"""Held-out prompts, sampled and scored: pass@1, pass@k, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from tandem.batch import Evaluation, Prompt, Rewards, Rollouts
from tandem.collect import collect
from tandem.config.data import DataConfig
from tandem.config.evaluation import EvaluationConfig
from tandem.data.prompts import load_prompts
from tandem.hybrid.workers import Workers
from tandem.observe.sample_text import first_problem
from tandem.rewards.pool import RewardPool

_SEED_OFFSET = 0x5EED  # other noise than that of training
_PASS = 1.0


HeldOut = Mapping[str, Sequence[Prompt]]  # name of a set -> its prompts; a set that is alone may be called ""


def load_held_out(
    config: EvaluationConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> HeldOut:
    """Read and tokenise the sets that the config names; none where it names none.

    Raises:
        DataError: A set cannot be read.
    """
    paths = {"": config.data} if isinstance(config.data, str) else config.data or {}
    return {name: load_prompts(path, tokenizer, data, seed=seed) for name, path in paths.items()}


def evaluate(
    workers: Workers, reward_fn: RewardPool, held_out: HeldOut, config: EvaluationConfig, *, step: int, seed: int = 0
) -> Evaluation:
    """Sample `evaluation.n` responses to each held-out prompt, score them, estimate pass@k.

    A response passes if its reward is at least 1. With several sets there are `name/pass@k` and, over all prompts,
    `pass@k`; with several data sources in a set likewise.

    Args:
        workers: Whose policy is asked.
        reward_fn: Scores in its own processes.
        held_out: The sets: {"": prompts}, or {"easy": prompts, "hard": prompts}.
        config: `n` and `temperature` matter here.
        step: Of training; each has noise of its own.
        seed: Of the run.

    Returns:
        pass@k for k = 1, 2, 4, ... and n, each with `_stderr`; `reward`, the mean reward. A response without a reward
        is left out and counted, a prompt without any, too.
    """
    parts: list[_Part] = []
    num_invalid, problem = 0, None
    with workers.rollout_phase(timed_as="evaluation") as engine:
        options = engine.options(step=step, n=config.n, temperature=config.temperature, seed=seed + _SEED_OFFSET)
        for name, prompts in held_out.items():
            rollouts, rewards = collect(engine, prompts, reward_fn, options)
            num_invalid += rewards.num_invalid
            problem = problem or first_problem(rollouts, rewards)
            parts += _parts(name, rollouts, rewards)
    metrics: dict[str, float] = {}
    for prefix in sorted({prefix for part in parts for prefix in part.prefixes}):
        metrics |= _summary(prefix, [part for part in parts if prefix in part.prefixes], config)
    return Evaluation(step=step, metrics=metrics, num_prompts=len(parts), num_invalid=num_invalid, problem=problem)


@dataclass(frozen=True)
class _Part:
    """One prompt's responses: how many were scored, how many passed, their mean reward."""

    prefixes: frozenset[str]
    scored: int
    passed: int
    reward: float


def _parts(name: str, rollouts: Rollouts, rewards: Rewards) -> list[_Part]:
    sources = {prompt.data_source for prompt in rollouts.prompts}
    rows: list[list[int]] = [[] for _ in rollouts.prompts]
    for row, group in enumerate(rollouts.group_ids.tolist()):
        rows[group].append(row)
    parts = []
    for prompt, members in zip(rollouts.prompts, rows, strict=True):
        prefixes = {"", f"{name}/" if name else ""}
        if len(sources) > 1:
            prefixes.add(f"{name}/{prompt.data_source}/" if name else f"{prompt.data_source}/")
        values = [float(rewards.values[row]) for row in members if bool(rewards.valid[row])]
        passed = sum(value >= _PASS for value in values)
        mean = sum(values) / len(values) if values else math.nan
        parts.append(_Part(frozenset(prefixes), len(values), passed, mean))
    return parts


def _summary(prefix: str, parts: Sequence[_Part], config: EvaluationConfig) -> dict[str, float]:
    scored = [part for part in parts if part.scored]
    summary = {f"{prefix}reward": _mean([part.reward for part in scored])}
    for k in config.ks:
        values = [pass_at_k(part.scored, part.passed, k) for part in scored if part.scored >= k]
        summary[f"{prefix}pass@{k}"] = _mean(values)
        summary[f"{prefix}pass@{k}_stderr"] = _stderr(values)
    return summary


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Probability that at least one of k responses passes, without bias from n of which `passed` do.

    1 - C(n - passed, k) / C(n, k)

    Source:
        Chen et al. (arXiv:2107.03374), 2.1.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _stderr(values: Sequence[float]) -> float:
    """Standard error of the mean over prompts; NaN for fewer than two."""
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
