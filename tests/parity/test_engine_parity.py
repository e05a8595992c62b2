"""The embedded engine against plain transformers: log-probs of a full forward, and greedy `generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tandem.batch import Prompt, Rollouts
from tandem.model.attention import register
from tandem.rollout.embedded import EmbeddedEngine
from tandem.rollout.options import SamplingOptions
from tandem.rollout.packed_linear import PackedLinears
from tests.tiny import ARCHITECTURES, tiny_model, tiny_tokenizer

register()
EOS = 1


def prompts_of(*lengths: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    return [
        Prompt(tuple(torch.randint(2, 99, (length,), generator=generator).tolist()), "", prompt_id=row)
        for row, length in enumerate(lengths)
    ]


def engine_of(model: PreTrainedModel, max_concurrent: int = 8, kv_cache_bytes: int | None = None) -> EmbeddedEngine:
    return EmbeddedEngine(
        model, tiny_tokenizer(), eos_ids=[EOS], max_concurrent=max_concurrent, kv_cache_bytes=kv_cache_bytes
    )


@torch.no_grad()
def full_forward_logprobs(reference: PreTrainedModel, rollouts: Rollouts, temperature: float) -> torch.Tensor:
    """Each sequence on its own through the reference, [B, L] like the rollouts'."""
    logprobs = torch.zeros_like(rollouts.rollout_logprobs)
    for row in range(len(rollouts)):
        prompt = rollouts.prompt_of(row).tokens
        response = rollouts.response_tokens[row, : rollouts.response_lengths[row]]
        logits = reference(torch.tensor([[*prompt, *response.tolist()]])).logits[0, len(prompt) - 1 : -1]
        scores = (logits.float() / temperature).log_softmax(-1)
        logprobs[row, : len(response)] = scores.gather(1, response[:, None])[:, 0]
    return logprobs


@pytest.mark.parametrize("attention", ["tandem", "tandem_eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_equal_a_full_forward(architecture: str, attention: str) -> None:
    """More responses than slots, prompts of mixed lengths beyond the sliding window, temperature 0.7."""
    model, reference = tiny_model(architecture, attention=attention), tiny_model(architecture)
    options = SamplingOptions(n=3, max_response_length=12, temperature=0.7, seed=3)
    rollouts = engine_of(model).generate(prompts_of(3, 17, 9, 17, 30), options)
    assert len(rollouts) == 15
    expected = full_forward_logprobs(reference, rollouts, 0.7)
    torch.testing.assert_close(rollouts.rollout_logprobs, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_generate(architecture: str) -> None:
    model, reference = tiny_model(architecture, attention="tandem"), tiny_model(architecture)
    prompts = prompts_of(5, 21, 2)
    rollouts = engine_of(model).generate(prompts, SamplingOptions(n=1, max_response_length=20, temperature=0.0))
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.tokens])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=EOS
        )
        written = rollouts.response_tokens[row, : rollouts.response_lengths[row]]
        assert written.tolist() == expected[0, len(prompt.tokens) :].tolist()
    torch.testing.assert_close(
        rollouts.rollout_logprobs, full_forward_logprobs(reference, rollouts, 1.0), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("hidden_size", [64, 256])  # of 256, linear layers are packed
@pytest.mark.parametrize("tie", [True, False])
def test_fault_25_after_a_large_update_the_logprobs_are_those_of_the_new_weights(tie: bool, hidden_size: int) -> None:
    size = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    model = tiny_model(attention="tandem", tie=tie, vocab_size=264, scale=2.0, overrides=size)
    reference = tiny_model(tie=tie, vocab_size=264, scale=2.0, overrides=size)
    assert bool(len(PackedLinears(model))) == (hidden_size == 256)
    engine, options = engine_of(model), SamplingOptions(n=4, max_response_length=8)
    prompts = prompts_of(6, 11)
    before = engine.generate(prompts, options)
    for sleeps in (False, True):
        if sleeps:
            engine.sleep()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for changed, same in zip(model.parameters(), reference.parameters(), strict=True):
                changed.add_(torch.randn(changed.shape, generator=generator) * 0.05)
                same.copy_(changed)
        engine.wake(policy_version=7)
        after = engine.generate(prompts, options)
        assert after.policy_version == 7
        assert after.response_tokens.tolist() != before.response_tokens.tolist()
        expected = full_forward_logprobs(reference, after, 1.0)
        torch.testing.assert_close(after.rollout_logprobs, expected, rtol=0, atol=2e-5)


def test_bfloat16_body_with_a_float32_head() -> None:
    """As in bf16 runs: the embedding is tied to the float32 head, everything else is bf16."""
    model, reference = tiny_model(attention="tandem"), tiny_model()
    for policy in (model, reference):
        head = policy.get_output_embeddings().weight
        policy.base_model.to(torch.bfloat16)
        for weight in policy.parameters():
            weight.data = weight.data.to(torch.bfloat16)
        head.data = head.data.float()
    rollouts = engine_of(model).generate(prompts_of(4, 9), SamplingOptions(n=4, max_response_length=8))
    for row in range(len(rollouts)):
        prompt = rollouts.prompt_of(row).tokens
        response = rollouts.response_tokens[row, : rollouts.response_lengths[row]]
        ids = torch.tensor([[*prompt, *response.tolist()]])
        with torch.no_grad():
            embeds = reference.get_input_embeddings()(ids).bfloat16()
            hidden = reference.base_model(inputs_embeds=embeds).last_hidden_state[0, len(prompt) - 1 : -1]
            expected = reference.get_output_embeddings()(hidden.float()).log_softmax(-1)
        written = rollouts.rollout_logprobs[row, : len(response)]
        difference = (written - expected.gather(1, response[:, None])[:, 0]).abs()
        assert float(difference.mean()) < 0.1
