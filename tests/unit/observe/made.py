"""Small steps, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tandem.batch import Prompt, Response, Rewards, Rollouts, UpdateResult


def made_rollouts(
    lengths: Sequence[Sequence[int]] = ((3, 1), (2, 2)), sources: Sequence[str] = ("sums", "sums")
) -> Rollouts:
    """One group for each inner sequence, with responses of these lengths; a response of length 3 is cut off."""
    prompts = [
        Prompt(
            tokens=(7, 8), text=f"prompt {group}", ground_truth=str(group), data_source=sources[group], prompt_id=group
        )
        for group in range(len(lengths))
    ]
    responses = [
        Response(
            group=group,
            index=index,
            tokens=tuple(range(10, 10 + length)),
            logprobs=tuple(-0.5 - position for position in range(length)),
            text=f"response {group}.{index}",
            finish_reason="length" if length == 3 else "stop",
        )
        for group, group_lengths in enumerate(lengths)
        for index, length in enumerate(group_lengths)
    ]
    return Rollouts.from_responses(prompts, responses)


def made_rewards(
    values: Sequence[float | None] = (1.0, 0.0, 1.0, 1.0), metrics: Mapping[str, float] | None = None
) -> Rewards:
    """None = no reward."""
    return Rewards(
        values=torch.tensor([value or 0.0 for value in values]),
        valid=torch.tensor([value is not None for value in values], dtype=torch.bool),
        problems={row: "the function raised ValueError" for row, value in enumerate(values) if value is None},
        metrics=metrics or {},
    )


def made_update(
    *,
    num_skipped: int = 0,
    logprobs: torch.Tensor | None = None,
    ratio: torch.Tensor | None = None,
    metrics: Mapping[str, float] | None = None,
) -> UpdateResult:
    return UpdateResult(
        loss=0.25,
        kl=None,
        entropy=None,
        ratio_mean=1.0,
        ratio_max=1.5,
        clip_fraction=0.125,
        grad_norm=2.0,
        lr=1e-6,
        num_updates=2 - num_skipped,
        num_skipped=num_skipped,
        policy_version=1,
        logprobs=logprobs,
        ratio=ratio,
        metrics=metrics or {},
    )
