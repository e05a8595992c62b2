"""GRPO as the notes on verl teach it, in plain PyTorch and transformers, one response at a time.

Slow and simple on purpose: this is what Tandem's packed, cached, cut-up computation must equal, and a place to read
what one step does. Of Tandem it takes the noise of the sampling and the order of the mini-batches, because both sides
must throw the same dice; everything else is written out. Where the notes are mistaken, this loop does what they mean:

- the model always reads prompt and response, also in the update, and every token of the response has a new log-prob;
- log-probs are of softmax(logits / temperature), with no top-k or top-p left over from a generation config;
- the surrogate is min(ratio * A, clip(ratio) * A), without a second A, and each mini-batch is averaged over its
  responses, not summed;
- the reference model is used: for the KL term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.batch import Prompt, Response, Rollouts
from tandem.rollout.noise import uniform_noise
from tandem.trainer.mini_batches import mini_batches


@dataclass(frozen=True)
class Settings:
    """The notes' numbers, and those that they leave open."""

    lr: float
    max_response_length: int
    seed: int = 0
    temperature: float = 1.0
    group_size: int = 8
    epochs: int = 4
    mini_batch: int = 8
    clip: float = 0.2
    kl_coef: float = 0.0
    max_grad_norm: float = 1.0


@dataclass
class Answer:
    """One response, and what the step finds out about it."""

    group: int
    index: int
    tokens: list[int]
    text: str
    reward: float = 0.0
    advantage: float = 0.0
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None


def run_step(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    reward: Callable[..., float],
    settings: Settings,
) -> list[Answer]:
    """The first step of a run: changes the model's weights, returns the responses in the order of the prompts."""
    # 1. Rollout: a group of responses to each prompt.
    answers = [
        sample(model, tokenizer, prompt, group, index, settings)
        for group, prompt in enumerate(prompts)
        for index in range(settings.group_size)
    ]
    # 2. Reward.
    for answer in answers:
        answer.reward = reward(solution_str=answer.text, ground_truth=prompts[answer.group].ground_truth)
    # 3. Log-probs under the old policy and the reference: a second forward pass over what was sampled.
    with torch.no_grad():
        for answer in answers:
            prompt = prompts[answer.group].tokens
            answer.old_logprobs = logprobs_of(model, prompt, answer.tokens, settings.temperature)
            if reference is not None:
                answer.ref_logprobs = logprobs_of(reference, prompt, answer.tokens, settings.temperature)
    # 4. Advantage: reward minus the group's mean.
    for group in range(len(prompts)):
        members = [answer for answer in answers if answer.group == group]
        mean = sum(answer.reward for answer in members) / len(members)
        for answer in members:
            answer.advantage = answer.reward - mean
    # 5. Update.
    update(model, prompts, answers, settings)
    return answers


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    group: int,
    index: int,
    settings: Settings,
) -> Answer:
    """Draw token after token, each from a full forward pass, until EOS or the limit."""
    tokens: list[int] = []
    while len(tokens) < settings.max_response_length:
        logits = model(torch.tensor([[*prompt.tokens, *tokens]]), use_cache=False).logits[0, -1]
        upto = torch.softmax(logits.double() / settings.temperature, dim=-1).cumsum(0)
        coordinates = (torch.tensor(number) for number in (prompt.prompt_id, index, len(tokens)))
        noise = uniform_noise(settings.seed, 1, *coordinates)
        tokens.append(int(torch.searchsorted(upto, noise[None] * upto[-1], right=True)))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    return Answer(group, index, tokens, tokenizer.decode(tokens, skip_special_tokens=True))


def logprobs_of(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """Of each response token: the position before it predicts it, so the first comes from the prompt's last token."""
    logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def update(model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[Answer], settings: Settings) -> None:
    """Several passes over the responses, in mini-batches that are shuffled one by one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    order = mini_batches(
        as_rollouts(prompts, answers),
        size=settings.mini_batch,
        shuffle="responses",
        epochs=settings.epochs,
        seed=(settings.seed, 1),
    )
    for rows in order:
        for row in rows:
            answer = answers[row]
            logprobs = logprobs_of(model, prompts[answer.group].tokens, answer.tokens, settings.temperature)
            (token_losses(logprobs, answer, settings).mean() / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


def token_losses(logprobs: Tensor, answer: Answer, settings: Settings) -> Tensor:
    """The clipped surrogate, and the KL to the reference by its k3 estimator."""
    assert answer.old_logprobs is not None
    ratio = (logprobs - answer.old_logprobs).exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    losses = -torch.minimum(ratio * answer.advantage, clipped * answer.advantage)
    if answer.ref_logprobs is not None:
        negative = answer.ref_logprobs - logprobs
        losses = losses + settings.kl_coef * (negative.exp() - 1 - negative)
    return losses


def as_rollouts(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> Rollouts:
    """In the form that the order of the mini-batches is asked for."""
    return Rollouts.from_responses(
        prompts,
        [
            Response(answer.group, answer.index, tuple(answer.tokens), (0.0,) * len(answer.tokens), answer.text, "stop")
            for answer in answers
        ],
    )
