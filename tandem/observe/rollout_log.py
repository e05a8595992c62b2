"""The responses of one step as JSON lines, token by token, for people who look at what the policy writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tandem.batch import Rewards, Rollouts, UpdateResult
from tandem.observe.folder import write_atomically
from tandem.observe.journal import as_json, cannot_write

MAX_TRUTH_CHARS = 10_000  # of a ground truth, which stands in the line of each response of its group


class RolloutLog:
    """Writes `step_000012.jsonl` for every so many steps, one response a line, the first `most` of the step."""

    def __init__(self, folder: Path, *, every: int, most: int) -> None:
        self.folder = folder
        self.every = every
        self.most = most

    def write(
        self,
        step: int,
        rollouts: Rollouts,
        rewards: Rewards,
        advantages: Float[Tensor, " B"] | Float[Tensor, "B L"],
        update: UpdateResult | None,
    ) -> None:
        """Write the step's responses, where it is this step's turn.

        Raises:
            CheckpointError: They cannot be written.
        """
        if self.every == 0 or step % self.every != 0:
            return
        rows = rollout_rows(step, rollouts, rewards, advantages, update, most=self.most)
        write_atomically(self.folder / f"step_{step:06d}.jsonl", "".join(f"{as_json(row)}\n" for row in rows))

    def cut_back(self, step: int) -> None:
        """Remove the files of later steps, and what a killed process left half written.

        Raises:
            CheckpointError: They cannot be removed.
        """
        for path in self.folder.glob("step_*.jsonl*"):
            number = path.name.removeprefix("step_").split(".")[0]
            if path.suffix != ".jsonl" or (number.isdigit() and int(number) > step):
                try:
                    path.unlink()
                except OSError as error:
                    raise cannot_write(path, error) from error


def rollout_rows(
    step: int,
    rollouts: Rollouts,
    rewards: Rewards,
    advantages: Float[Tensor, " B"] | Float[Tensor, "B L"],
    update: UpdateResult | None,
    *,
    most: int,
) -> Iterator[dict[str, Any]]:
    """One JSON-able object per response, at most `most`. Lists have one number for each token of the response."""
    for row in range(min(most, len(rollouts))):
        prompt = rollouts.prompt_of(row)
        length = int(rollouts.response_lengths[row])
        group = int(rollouts.group_ids[row])
        valid = bool(rewards.valid[row])
        yield {
            "step": step,
            "group": group,
            "prompt_id": prompt.prompt_id,
            "data_source": prompt.data_source,
            "prompt": prompt.text,
            "response": rollouts.texts[row],
            "ground_truth": _shortened(prompt.ground_truth),
            "reward": float(rewards.values[row]) if valid else None,
            "valid": valid,
            "problem": rewards.problems.get(row),
            "advantage": advantages[row, :length].tolist() if advantages.dim() == 2 else float(advantages[row]),
            "finish_reason": rollouts.finish_reasons[row],
            "policy_version": rollouts.policy_version,
            "tokens": rollouts.response_tokens[row, :length].tolist(),
            "mask": rollouts.response_mask[row, :length].to(torch.int64).tolist(),
            "rollout_logprobs": rollouts.rollout_logprobs[row, :length].tolist(),
            "logprobs": _row(None if update is None else update.logprobs, row, length),
            "ratio": _row(None if update is None else update.ratio, row, length),
        }


def _row(values: Float[Tensor, "B L"] | None, row: int, length: int) -> list[float] | None:
    return None if values is None else values[row, :length].tolist()


def _shortened(truth: Any) -> Any:
    """A ground truth as it is, unless it is long: then the beginning of its text, and how long it was."""
    text = truth if isinstance(truth, str) else as_json(truth)
    return truth if len(text) <= MAX_TRUTH_CHARS else f"{text[:MAX_TRUTH_CHARS]} ... ({len(text)} characters)"
