"""Packed training against plain transformers, one sequence at a time: log-probs and gradients, every architecture."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from tandem.batch import Prompt, Response, Rollouts
from tandem.model.attention import NAMES, register
from tandem.trainer.logprobs import response_logprobs
from tests.tiny import ARCHITECTURES, tiny_model

PROMPT_LENGTHS = (3, 11, 11, 6, 1)
RESPONSE_LENGTHS = ((4, 1, 9), (7, 7, 7), (2, 12, 5), (1, 1, 1), (10, 3, 2))


def make_rollouts(seed: int = 0, vocab: int = 100, temperature: float = 1.0) -> Rollouts:
    """Groups with prompts and responses of many lengths, one-token responses among them."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, vocab, (count,), generator=generator).tolist())

    prompts = [Prompt(tokens=tokens(length), text="", prompt_id=index) for index, length in enumerate(PROMPT_LENGTHS)]
    responses = [
        Response(
            group=group, index=index, tokens=tokens(length), logprobs=(0.0,) * length, text="", finish_reason="stop"
        )
        for group, lengths in enumerate(RESPONSE_LENGTHS)
        for index, length in enumerate(lengths)
    ]
    return Rollouts.from_responses(prompts, responses, temperature=temperature)


def plain_logprobs(model: PreTrainedModel, rollouts: Rollouts) -> torch.Tensor:
    """Each sequence alone through transformers' own attention and head."""
    rows = []
    for row in range(len(rollouts)):
        prompt = rollouts.prompt_of(row).tokens
        response = rollouts.response_tokens[row, : rollouts.response_lengths[row]]
        ids = torch.cat([torch.tensor(prompt), response])[None]
        logits = model(ids, use_cache=False).logits[0].float() / rollouts.temperature
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0]
        rows.append(torch.nn.functional.pad(logprobs, (0, rollouts.response_tokens.shape[1] - len(response))))
    return torch.stack(rows)


def with_tandem_attention(model: PreTrainedModel, kind: str = "sdpa") -> PreTrainedModel:
    register()
    other = copy.deepcopy(model)
    other.set_attn_implementation(NAMES[kind])
    return other


def gradient_of(model: PreTrainedModel, logprobs: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    (logprobs * torch.randn(logprobs.shape, generator=generator)).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("packing", ["shared_prefix", "varlen", "auto"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_rows_equal_separate_sequences(architecture: str, packing: str) -> None:
    plain = tiny_model(architecture)
    packed = with_tandem_attention(plain)
    rollouts = make_rollouts(temperature=0.7)

    expected = plain_logprobs(plain, rollouts)
    found = response_logprobs(packed, rollouts, packing=packing)

    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    expected_gradient = gradient_of(plain, expected)
    gradient = gradient_of(packed, found)
    assert expected_gradient.norm() > 1e-3
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-5


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_both_kinds_of_attention_agree(kind: str) -> None:
    plain = tiny_model("Gemma3ForCausalLM")
    rollouts = make_rollouts(seed=3)
    found = response_logprobs(with_tandem_attention(plain, kind), rollouts, packing="shared_prefix")
    torch.testing.assert_close(found, plain_logprobs(plain, rollouts), atol=2e-5, rtol=0)


def test_query_chunks_of_a_long_response_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_model("Gemma3ForCausalLM")
    rollouts = make_rollouts(seed=4)
    monkeypatch.setattr("tandem.model.packed_spans.QUERY_CHUNK", 4)
    found = response_logprobs(with_tandem_attention(plain), rollouts, packing="shared_prefix")
    torch.testing.assert_close(found, plain_logprobs(plain, rollouts), atol=2e-5, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
def test_fault_23_prime_vocabulary_and_chunked_head_equal_the_naive_one(chunk_tokens: int) -> None:
    plain = tiny_model("Qwen3ForCausalLM", vocab_size=101)
    packed = with_tandem_attention(plain)
    rollouts = make_rollouts(seed=5)
    expected = plain_logprobs(plain, rollouts)
    found = response_logprobs(packed, rollouts, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    expected_gradient = gradient_of(plain, expected)
    assert (gradient_of(packed, found) - expected_gradient).norm() / expected_gradient.norm() < 1e-5
