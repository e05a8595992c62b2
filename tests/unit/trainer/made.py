"""A tiny policy with an optimizer, and rollouts of all shapes, for the tests of the trainer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.algorithm.protocols import Loss
from tandem.batch import Prompt, Response, Rollouts, UpdateResult
from tandem.model.attention import NAMES, register
from tandem.trainer.logprobs import batch_logprobs
from tandem.trainer.master_weights import MasterWeights
from tandem.trainer.optim import Optimizer, StepOutcome
from tandem.trainer.packing import PackingOptions
from tandem.trainer.policy import Policy
from tandem.trainer.update import UpdateBatch, UpdateOptions, update_policy
from tandem.trainer.weights import Weights
from tests.tiny import tiny_model

PROMPT_LENGTHS = (9, 2, 5, 3)
RESPONSE_LENGTHS = ((3, 1, 6), (8, 2, 4), (1, 5, 5), (7, 3, 2))  # a response of one token: EOS at once
CUT_OFF = (1, 0)  # (group, index) of the response that ends by the length limit


@dataclass
class Trainee:
    """A policy and what updates it. float32 on the CPU unless said otherwise; on several ranks each has a part."""

    model: PreTrainedModel
    weights: Weights
    policy: Policy
    optimizer: Optimizer

    def gradient(self) -> Tensor:
        """All gradients that have been added up, as one vector."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.weights.parameters()]
        return torch.cat([grad.flatten() for grad in grads])

    def vector(self) -> Tensor:
        """All weights, as one vector."""
        return torch.cat([weight.detach().flatten() for weight in self.weights.parameters()]).clone()


class KeepGradient(Optimizer):
    """Keeps the gradient of each update as it was before clipping, and changes no weight."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, max_grad_norm=1e9)
        self.gradients: list[Tensor] = []

    def step(self, lr: float, *, loss_is_finite: bool) -> StepOutcome:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.weights.parameters()]
        self.gradients.append(torch.cat([grad.flatten() for grad in grads]).clone())
        return super().step(0.0, loss_is_finite=loss_is_finite)


@functools.cache
def _model() -> PreTrainedModel:
    register()
    return tiny_model(attention=NAMES["sdpa"])


def trainee(
    *,
    chunk_tokens: int = 1024,
    checkpointing: bool = False,
    body_dtype: torch.dtype = torch.float32,
    head_dtype: torch.dtype = torch.float32,
    keep_gradient: bool = False,
    max_skipped: int = 5,
) -> Trainee:
    """A fresh one, always with the same weights."""
    model = copy.deepcopy(_model())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    weights = MasterWeights(model, body_dtype=body_dtype, head_dtype=head_dtype)
    optimizer = KeepGradient(weights) if keep_gradient else Optimizer(weights, max_skipped=max_skipped)
    return Trainee(model, weights, Policy(model, chunk_tokens=chunk_tokens), optimizer)


def make_rollouts(
    *,
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS,
    response_lengths: Sequence[Sequence[int]] = RESPONSE_LENGTHS,
    seed: int = 0,
    temperature: float = 0.7,
    holes: bool = False,
) -> Rollouts:
    """Random prompts and responses. With `holes`, every third response token is none that the policy wrote."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, 100, (count,), generator=generator).tolist())

    prompts = [Prompt(tokens(length), "", prompt_id=number) for number, length in enumerate(prompt_lengths)]
    responses = [
        Response(
            group=group,
            index=index,
            tokens=tokens(length),
            logprobs=(-3.0,) * length,
            text="",
            finish_reason="length" if (group, index) == CUT_OFF else "stop",
        )
        for group, lengths in enumerate(response_lengths)
        for index, length in enumerate(lengths)
    ]
    rollouts = Rollouts.from_responses(prompts, responses, temperature=temperature)
    if holes:
        columns = torch.arange(rollouts.response_mask.shape[1])
        rollouts = replace(rollouts, response_mask=rollouts.response_mask & (columns % 3 != 1))
    return rollouts


def only_rows(rollouts: Rollouts, rows: Sequence[int]) -> Rollouts:
    """The same rollouts with some of their responses only."""
    index = list(rows)
    return replace(
        rollouts,
        group_ids=rollouts.group_ids[index],
        response_tokens=rollouts.response_tokens[index],
        response_lengths=rollouts.response_lengths[index],
        response_mask=rollouts.response_mask[index],
        rollout_logprobs=rollouts.rollout_logprobs[index],
        texts=tuple(rollouts.texts[row] for row in index),
        finish_reasons=tuple(rollouts.finish_reasons[row] for row in index),
    )


def advantages_of(rollouts: Rollouts, *, seed: int = 1, idle: Sequence[int] = ()) -> Tensor:
    """Random, [B, 1]; 0 for the rows in `idle`."""
    values = torch.randn(len(rollouts), generator=torch.Generator().manual_seed(seed))
    values[list(idle)] = 0.0
    return values[:, None]


def make_batch(
    rollouts: Rollouts,
    *,
    idle: Sequence[int] = (),
    mask: Tensor | None = None,
    on_policy: bool = False,
    reference: bool = False,
) -> UpdateBatch:
    """Old log-probs some way off the policy's, so that clipping acts; the reference likewise."""
    start = trainee()
    logprobs = batch_logprobs(start.policy, rollouts, PackingOptions("none"))
    generator = torch.Generator().manual_seed(5)

    def near() -> Tensor:
        return logprobs + 0.3 * torch.randn(logprobs.shape, generator=generator)

    old, ref = near(), near()
    return UpdateBatch(
        rollouts=rollouts,
        advantages=advantages_of(rollouts, idle=idle),
        loss_mask=rollouts.response_mask if mask is None else mask,
        old_logprobs=None if on_policy else old,
        ref_logprobs=ref if reference else None,
    )


def run_update(
    learner: Trainee, batch: UpdateBatch, loss: Loss, options: UpdateOptions | None = None, *, lr: float = 1e-3
) -> UpdateResult:
    """One step's update, the first."""
    return update_policy(
        learner.policy, learner.optimizer, batch, loss, options or UpdateOptions(), lr=lr, seed=(0, 1), policy_version=1
    )
