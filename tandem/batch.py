"""What flows between the five steps: prompts, rollouts, rewards, the result of an update, an evaluation.

A per-token quantity of responses is a matrix [B, L]: one row per response, L the longest one, zeros to the
right. These small matrices are the only padding in Tandem: the model itself runs on packed sequences.

    P prompts, n responses each:  B = P * n responses, in the order of the prompts
    group_ids       [B]     0 0 0 0 1 1 1 1        which prompt each response answers
    response_mask   [B, L]  1 1 1 0                tokens that the policy wrote and that enter the loss; may have gaps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One row of the data, tokenised. `tokens` is what the policy reads, special tokens included."""

    tokens: tuple[int, ...]
    text: str
    ground_truth: Any = None
    data_source: str = ""
    extra_info: Any = None
    prompt_id: int = 0  # position in the whole run's stream of prompts: one id for each draw, used to seed the sampling


@dataclass(frozen=True)
class Response:
    """One finished response, as an engine hands it out. `tokens` includes the EOS token where one was drawn."""

    group: int  # index of its prompt in the batch
    index: int  # number within its group, 0 .. n-1
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of each token, at the temperature that it was drawn with
    text: str  # decoded, without special tokens and without the stop string
    finish_reason: str  # "stop": EOS or stop string, "length": cut off at the limit

    @property
    def is_truncated(self) -> bool:
        """Whether it was cut off at the length limit."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Rollouts:
    """Groups of responses to a batch of prompts, with the log-probs kept while sampling."""

    prompts: tuple[Prompt, ...]
    group_ids: Int[Tensor, " B"]
    response_tokens: Int[Tensor, "B L"]
    response_lengths: Int[Tensor, " B"]
    response_mask: Bool[Tensor, "B L"]
    rollout_logprobs: Float[Tensor, "B L"]
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    temperature: float = 1.0
    policy_version: int = 0  # of the workers that wrote them: it does not tell two workers apart
    cut_logprobs: bool = False  # `rollout_logprobs` are of what top_p or top_k have left: no match for the trainer's

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def truncated(self) -> Bool[Tensor, " B"]:
        """True where a response was cut off at the length limit."""
        return torch.tensor([reason == "length" for reason in self.finish_reasons], dtype=torch.bool)

    def loss_mask(self, *, mask_truncated: bool) -> Bool[Tensor, "B L"]:
        """Tokens that enter the loss: those of the response mask, without cut-off responses where `mask_truncated`.

        Source:
            DAPO (arXiv:2503.14476), 3.4, overlong filtering.
        """
        return self.response_mask & ~self.truncated[:, None] if mask_truncated else self.response_mask

    def prompt_of(self, row: int) -> Prompt:
        """The prompt that response `row` answers."""
        return self.prompts[int(self.group_ids[row])]

    @staticmethod
    def from_responses(
        prompts: Sequence[Prompt],
        responses: Sequence[Response],
        *,
        temperature: float = 1.0,
        policy_version: int = 0,
        cut_logprobs: bool = False,
    ) -> Rollouts:
        """Order finished responses by (group, index) and lay them out as matrices."""
        ordered = sorted(responses, key=lambda response: (response.group, response.index))
        lengths = torch.tensor([len(response.tokens) for response in ordered], dtype=torch.int64)
        width = max([1, *(len(response.tokens) for response in ordered)])
        tokens = [[*response.tokens, *[0] * (width - len(response.tokens))] for response in ordered]
        logprobs = [[*response.logprobs, *[0.0] * (width - len(response.tokens))] for response in ordered]
        return Rollouts(
            prompts=tuple(prompts),
            group_ids=torch.tensor([response.group for response in ordered], dtype=torch.int64),
            response_tokens=torch.tensor(tokens, dtype=torch.int64).view(len(ordered), width),
            response_lengths=lengths,
            response_mask=torch.arange(width)[None, :] < lengths[:, None],
            rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32).view(len(ordered), width),
            texts=tuple(response.text for response in ordered),
            finish_reasons=tuple(response.finish_reason for response in ordered),
            temperature=temperature,
            policy_version=policy_version,
            cut_logprobs=cut_logprobs,
        )


@dataclass(frozen=True)
class Rewards:
    """The score of each response. Where `valid` is False there is none, and `values` holds 0 as a placeholder only."""

    values: Float[Tensor, " B"]
    valid: Bool[Tensor, " B"]
    problems: Mapping[int, str] = field(default_factory=dict)  # row -> why it has no reward
    metrics: Mapping[str, float] = field(default_factory=dict)  # extra keys of the reward function, averaged
    components: Mapping[str, Float[Tensor, " B"]] = field(default_factory=dict)  # the same per response; NaN = has none
    baselines: Float[Tensor, " B"] | None = None  # reward of the greedy response to the same prompt; NaN = has none
    drawn: Drawn | None = None  # where these are not the rewards as the function gave them, of all that was drawn

    @property
    def mean(self) -> float:
        """Mean over valid rewards; NaN where there are none."""
        return float(self.values[self.valid].double().mean()) if bool(self.valid.any()) else float("nan")

    @property
    def std(self) -> float:
        """Sample standard deviation over valid rewards; 0 where there are fewer than two."""
        return float(self.values[self.valid].double().std()) if int(self.valid.sum()) > 1 else 0.0

    @property
    def num_invalid(self) -> int:
        """How many responses have no reward."""
        return int((~self.valid).sum())


def with_contrast(
    rewards: Float[Tensor, " B"], valid: Bool[Tensor, " B"], group_ids: Int[Tensor, " B"], num_groups: int
) -> Bool[Tensor, " N"]:
    """Of each of `num_groups` groups, whether two of its valid rewards differ: without that it shows no better way."""
    rewards, group_ids = rewards[valid], group_ids[valid]
    none = rewards.new_zeros(num_groups)
    lowest = none.scatter_reduce(0, group_ids, rewards, "amin", include_self=False)
    highest = none.scatter_reduce(0, group_ids, rewards, "amax", include_self=False)
    return highest > lowest


@dataclass(frozen=True)
class Drawn:
    """All responses that a step has drawn, with their rewards as the function gave them.

    What is learnt from may be less (groups without contrast are put aside), and shaped (long responses pay).
    """

    rollouts: Rollouts
    rewards: Rewards
    num_batches: int = 1
    num_idle: int = 0  # groups put aside, since they had no contrast
    num_surplus: int = 0  # groups with contrast that were more than the step needs
    num_missing: int = 0  # groups with contrast that the step lacks


@dataclass(frozen=True)
class UpdateResult:
    """What one step's update did. Means are over the tokens in the loss that were run, of all mini-batches and epochs.

    A response of advantage 0 that has no other term in the loss is not run.
    """

    loss: float
    kl: float | None  # against the reference; None without one
    entropy: float | None
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    grad_norm: float  # before clipping, mean over the mini-batches
    lr: float
    num_updates: int  # optimizer steps taken
    num_skipped: int  # optimizer steps left out because loss or gradient was not finite
    policy_version: int
    logprobs: Float[Tensor, "B L"] | None = None  # at the last pass over each row; NaN in rows that were not run
    ratio: Float[Tensor, "B L"] | None = None  # likewise, 0 outside of the loss mask
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CriticUpdate:
    """What one step's update of the critic did. Means are over the tokens in its loss."""

    loss: float  # of all mini-batches
    clip_fraction: float  # tokens of all mini-batches and epochs whose loss is that of the clipped value
    value_mean: float  # before the update, in the reward's unit; NaN where no token is in the loss
    explained_variance: float  # of the returns, by the values before the update; NaN where they are all equal
    grad_norm: float  # before clipping, mean over the mini-batches
    lr: float
    num_updates: int  # optimizer steps taken
    num_skipped: int  # optimizer steps left out because loss or gradient was not finite


@dataclass(frozen=True)
class Evaluation:
    """Held-out results: name of the metric -> value, such as `pass@1`, `pass@1_stderr`, `source/pass@1`."""

    step: int
    metrics: Mapping[str, float]
    num_prompts: int
    num_invalid: int = 0
    problem: str | None = None  # the first response without a reward, and why
