"""The engine on slices of a model against a full forward of the whole one, and against the engine on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.batch import Response, Rollouts
from tandem.model.ranks import Ranks
from tandem.model.skeleton import materialise, release
from tandem.model.tensor_parallel import sliced_linears
from tandem.rollout.embedded import EmbeddedEngine
from tandem.rollout.options import SamplingOptions
from tandem.rollout.packed_linear import PackedLinears
from tandem.rollout.replicas import ReplicatedEngine
from tests.parity.test_engine_parity import engine_of, full_forward_logprobs, prompts_of
from tests.ranks import RankProcesses
from tests.sliced import CPU, fill, sliced_engine
from tests.tiny import ARCHITECTURES, tiny_model, tiny_tokenizer

PLANNED = [architecture for architecture in ARCHITECTURES if architecture != "GPT2LMHeadModel"]
PROMPTS = prompts_of(3, 17, 9, 17, 30)  # mixed lengths, beyond the sliding window
OPTIONS = SamplingOptions(n=3, max_response_length=12, temperature=0.7, seed=3)  # more responses than slots
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024}  # so wide that linear layers are packed


def on_two_ranks(
    ranks: Ranks, model: Mapping[str, Any], options: Sequence[SamplingOptions], body_dtype: torch.dtype
) -> list[Rollouts]:
    engine = sliced_engine(ranks, 2, tiny_model(**model), body_dtype=body_dtype)
    return [engine.generate(PROMPTS, each) for each in options]


def assert_equal_to_the_bit(rollouts: Rollouts, other: Rollouts) -> None:
    assert torch.equal(rollouts.response_tokens, other.response_tokens)
    assert torch.equal(rollouts.rollout_logprobs, other.rollout_logprobs)
    assert rollouts.texts == other.texts


MODELS: dict[str, dict[str, Any]] = {
    **{architecture: {"architecture": architecture} for architecture in PLANNED},
    "untied": {"architecture": "Qwen3ForCausalLM", "tie": False},
    "packed": {"architecture": "Qwen3ForCausalLM", "overrides": WIDE, "vocab_size": 512, "scale": 2.0},
    "packed, with biases": {
        "architecture": "LlamaForCausalLM",
        "overrides": {**WIDE, "attention_bias": True, "mlp_bias": True},
        "scale": 2.0,
    },
    "packed, fused": {"architecture": "Phi3ForCausalLM", "overrides": WIDE, "scale": 2.0},
}


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_write_what_one_writes_with_the_logprobs_of_a_full_forward(ranks: RankProcesses, name: str) -> None:
    model = MODELS[name]
    options = [OPTIONS, replace(OPTIONS, temperature=1.0, seed=4)]
    first, second = ranks.run(on_two_ranks, 2, model, options, torch.float32)
    alone = engine_of(tiny_model(**model, attention="tandem"))
    reference = tiny_model(**model)
    for each, sliced, other in zip(options, first, second, strict=True):
        assert_equal_to_the_bit(sliced, other)
        expected = full_forward_logprobs(reference, sliced, each.temperature)
        torch.testing.assert_close(sliced.rollout_logprobs, expected, rtol=0, atol=2e-5)
        whole = alone.generate(PROMPTS, each)
        assert torch.equal(sliced.response_tokens, whole.response_tokens)
        torch.testing.assert_close(sliced.rollout_logprobs, whole.rollout_logprobs, rtol=0, atol=2e-5)


def packed_and_cached(ranks: Ranks, model: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    engine = sliced_engine(ranks, 2, tiny_model(**model))
    forwards = [vars(module).get("forward") for module in engine.model.modules()]
    engine.generate(PROMPTS, OPTIONS)
    assert [vars(module).get("forward") for module in engine.model.modules()] == forwards  # the plan's are back
    assert engine._cache is not None
    return len(PackedLinears(engine.model, sliced_linears(engine.model))), tuple(engine._cache.keys[0].shape)


def test_layers_are_packed_and_the_cache_has_this_ranks_heads(ranks: RankProcesses) -> None:
    layers_and_head = 2 * 3 + 1  # gate, up, down; 256 x 512 / 2 of the vocabulary. Attention is too small
    assert ranks.run(packed_and_cached, 2, MODELS["packed"]) == [(layers_and_head, (8, 1, 64, 16))] * 2
    assert ranks.run(packed_and_cached, 2, MODELS["LlamaForCausalLM"])[0] == (0, (8, 1, 64, 16))
    assert ranks.run(packed_and_cached, 2, MODELS["Phi3ForCausalLM"])[0] == (0, (8, 2, 64, 16))  # all of them


def test_in_bfloat16_two_ranks_are_as_near_to_float32_as_one(ranks: RankProcesses) -> None:
    """Sums over the ranks are rounded to bfloat16 like any other: 0.1 in the mean is the bound for one rank, too."""
    model = MODELS["Qwen3ForCausalLM"]
    ([sliced], [other]) = ranks.run(on_two_ranks, 2, model, [OPTIONS], torch.bfloat16)
    assert_equal_to_the_bit(sliced, other)
    expected = full_forward_logprobs(tiny_model(**model), sliced, OPTIONS.temperature)
    difference = (sliced.rollout_logprobs - expected)[sliced.response_mask].abs()
    assert 1e-4 < float(difference.mean()) < 0.1


def after_new_weights(ranks: Ranks) -> Rollouts:
    engine = sliced_engine(ranks, 2, tiny_model(tie=True))
    engine.generate(PROMPTS, OPTIONS)
    engine.sleep()
    release(engine.model)
    materialise(engine.model, CPU)
    fill(engine.model, tiny_model(seed=1))
    engine.wake(policy_version=7)
    return engine.generate(PROMPTS, OPTIONS)


def test_fault_25_after_release_the_logprobs_are_those_of_the_new_weights(ranks: RankProcesses) -> None:
    first, second = ranks.run(after_new_weights, 2)
    assert_equal_to_the_bit(first, second)
    assert first.policy_version == 7
    expected = full_forward_logprobs(tiny_model(seed=1), first, OPTIONS.temperature)
    torch.testing.assert_close(first.rollout_logprobs, expected, rtol=0, atol=2e-5)


def in_several_ways(ranks: Ranks, eos_ids: tuple[int, ...], stop: tuple[str, ...]) -> list[Response]:
    engine = sliced_engine(ranks, 2, tiny_model(), eos_ids=eos_ids)
    return list(engine.stream(PROMPTS, replace(OPTIONS, n=8, max_response_length=30, stop=stop)))


def test_responses_end_as_on_one_rank(ranks: RankProcesses) -> None:
    """With several EOS ids, stop strings and the length limit, in the same order."""
    eos_ids, stop = (1, 5, 9), ("a", "7 ", "B")
    first, second = ranks.run(in_several_ways, 2, eos_ids, stop)
    assert first == second
    alone = EmbeddedEngine(tiny_model(attention="tandem"), tiny_tokenizer(), eos_ids=eos_ids, max_concurrent=8)
    whole = list(alone.stream(PROMPTS, replace(OPTIONS, n=8, max_response_length=30, stop=stop)))
    assert [replace(each, logprobs=()) for each in first] == [replace(each, logprobs=()) for each in whole]
    ends = {token for each in whole for token in each.tokens[-1:] if token in eos_ids}
    assert ends == {*eos_ids}
    assert any(each.finish_reason == "length" for each in whole)
    assert any(each.finish_reason == "stop" and each.tokens[-1] not in eos_ids for each in whole)


def with_other_noise(ranks: Ranks) -> Rollouts:
    """What a GPU's last bits may do: the ranks draw other tokens from the same logits."""
    return sliced_engine(ranks, 2, tiny_model()).generate(PROMPTS, replace(OPTIONS, seed=ranks.rank))


def test_the_first_ranks_draw_counts(ranks: RankProcesses) -> None:
    first, second = ranks.run(with_other_noise, 2)
    whole = engine_of(tiny_model(attention="tandem")).generate(PROMPTS, replace(OPTIONS, seed=0))
    for rollouts in (first, second):
        assert torch.equal(rollouts.response_tokens, whole.response_tokens)


def of_four_ranks(ranks: Ranks, model: Mapping[str, Any], tensor_parallel: int, num_prompts: int) -> list[Response]:
    engine = sliced_engine(ranks, tensor_parallel, tiny_model(**model))
    return list(ReplicatedEngine(engine, ranks, tensor_parallel).stream(PROMPTS[:num_prompts], OPTIONS))


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_four_ranks_write_what_one_writes(ranks: RankProcesses, tensor_parallel: int) -> None:
    model = {"architecture": "Qwen3ForCausalLM", "overrides": {"num_key_value_heads": 4}}
    each = ranks.run(of_four_ranks, 4, model, tensor_parallel, len(PROMPTS))
    yielding = range(0, 4, tensor_parallel)
    assert [bool(responses) for responses in each] == [rank in yielding for rank in range(4)]
    for replica, rank in enumerate(yielding):
        assert {response.group % len(yielding) for response in each[rank]} == {replica}
    together = Rollouts.from_responses(PROMPTS, [response for responses in each for response in responses])
    whole = engine_of(tiny_model(**model, attention="tandem")).generate(PROMPTS, OPTIONS)
    assert torch.equal(together.response_tokens, whole.response_tokens)
    assert together.texts == whole.texts
    torch.testing.assert_close(together.rollout_logprobs, whole.rollout_logprobs, rtol=0, atol=2e-5)


def test_fault_30_a_replica_without_prompts_waits_for_nobody(ranks: RankProcesses) -> None:
    first, *others = ranks.run(of_four_ranks, 4, MODELS["Qwen3ForCausalLM"], 2, 1)
    assert len(first) == OPTIONS.n
    assert others == [[], [], []]
