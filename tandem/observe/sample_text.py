"""A response and what is wrong with it, for people."""

from __future__ import annotations

from tandem.batch import Rewards, Rollouts

SAMPLE_CHARS = 300  # of a prompt or a response


def first_problem(rollouts: Rollouts, rewards: Rewards) -> str | None:
    """The first response without a reward; None where all have one."""
    row = min(rewards.problems, default=None)
    return None if row is None else sample_text(rollouts, row, rewards.problems[row])


def sample_text(rollouts: Rollouts, row: int, problem: str) -> str:
    """A response that something is wrong with: prompt, response, ground truth, problem."""
    prompt = rollouts.prompt_of(row)
    parts = {
        "prompt": _shortened(prompt.text),
        "response": _shortened(rollouts.texts[row]),
        "ground truth": _shortened(str(prompt.ground_truth)),
        "problem": problem,
    }
    return "\n".join(f"{name}: {text}" for name, text in parts.items())


def _shortened(text: str) -> str:
    """The end of it, where answers are."""
    return text if len(text) <= SAMPLE_CHARS else "..." + text[-SAMPLE_CHARS:]
