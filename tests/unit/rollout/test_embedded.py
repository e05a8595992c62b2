"""The embedded engine: schedule, stopping, limits, memory. Its numbers are held in tests/parity."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from tandem.batch import Prompt, Response
from tandem.errors import DataError, ModelError, PhaseError
from tandem.model.attention import register
from tandem.rollout.embedded import EmbeddedEngine
from tandem.rollout.kv_cache import KVCache
from tandem.rollout.options import SamplingOptions
from tests.tiny import LONGROPE, tiny_model, tiny_tokenizer

register()
TOKENIZER = tiny_tokenizer()
VOCABULARY = 104


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(attention="tandem")


def engine_of(model: PreTrainedModel, eos_ids: Sequence[int] = (1,), **changes: int | None) -> EmbeddedEngine:
    return EmbeddedEngine(model, TOKENIZER, eos_ids=eos_ids, **changes)


def prompts_of(*texts: str) -> list[Prompt]:
    return [Prompt(tuple(TOKENIZER.encode(text)), text, prompt_id=row) for row, text in enumerate(texts)]


MIXED = prompts_of("2+2=", "a much longer prompt than the other ones", "x", "12", "another of its own length", "34")


def forced(token: int) -> PreTrainedModel:
    """A model that always writes `token`: all weight is in the bias of its head."""
    policy = tiny_model(attention="tandem", tie=False)
    policy.lm_head.weight.data.zero_()
    policy.lm_head.bias = torch.nn.Parameter(torch.full((VOCABULARY,), -30.0))
    policy.lm_head.bias.data[token] = 0.0
    return policy


def by_key(responses: Sequence[Response]) -> dict[tuple[int, int], Response]:
    return {(response.group, response.index): response for response in responses}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_responses_do_not_depend_on_the_number_of_slots(model: PreTrainedModel, temperature: float) -> None:
    options = SamplingOptions(n=5, max_response_length=20, temperature=temperature, seed=1)
    expected = by_key(list(engine_of(model, max_concurrent=8).stream(MIXED, options)))
    assert len(expected) == 30
    for max_concurrent in (16, 64):
        assert by_key(list(engine_of(model, max_concurrent=max_concurrent).stream(MIXED, options))) == expected


def test_responses_do_not_depend_on_the_other_prompts(model: PreTrainedModel) -> None:
    options = SamplingOptions(n=8, max_response_length=10)
    together = engine_of(model).generate(MIXED, options)
    for row, prompt in enumerate(MIXED):
        alone = engine_of(model).generate([prompt], options)
        assert alone.texts == together.texts[8 * row : 8 * row + 8]


def test_the_same_call_repeats_to_the_bit_also_in_used_memory(model: PreTrainedModel) -> None:
    engine, options = engine_of(model, max_concurrent=8), SamplingOptions(n=3, max_response_length=16, seed=4)
    first = list(engine.stream(MIXED, options))
    list(engine.stream(MIXED[:2], dataclasses.replace(options, seed=5, max_response_length=40)))
    assert list(engine.stream(MIXED, options)) == first  # in the same order, too


def test_responses_of_a_long_run_of_refills_are_right(model: PreTrainedModel) -> None:
    """Noise is hashed in blocks of positions: responses that begin within a block get their own."""
    options = SamplingOptions(n=2, max_response_length=150)
    few = by_key(list(engine_of(model, max_concurrent=8).stream(MIXED * 2, options)))
    many = by_key(list(engine_of(model, max_concurrent=64).stream(MIXED * 2, options)))
    assert few == many
    assert max(len(response.tokens) for response in few.values()) > 64


def test_seed_step_prompt_id_and_index_change_the_noise(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    options = SamplingOptions(n=2, max_response_length=12)
    base = engine.generate(MIXED[:1], options)
    assert base.texts[0] != base.texts[1]
    assert engine.generate(MIXED[:1], dataclasses.replace(options, seed=1)).texts != base.texts
    assert engine.generate(MIXED[:1], dataclasses.replace(options, step=1)).texts != base.texts
    again = dataclasses.replace(MIXED[0], prompt_id=77)
    twice = engine.generate([MIXED[0], MIXED[0], again], options)
    assert twice.texts[:2] == twice.texts[2:4] == base.texts
    assert twice.texts[4:] != base.texts


def test_responses_come_as_they_end(model: PreTrainedModel) -> None:
    options = SamplingOptions(n=8, max_response_length=60)
    responses = list(engine_of(model, max_concurrent=16).stream(MIXED, options))
    assert len(responses) == 48
    assert [(response.group, response.index) for response in responses] != sorted(by_key(responses))
    first = next(iter(engine_of(model, max_concurrent=16).stream(MIXED, options)))
    assert first == responses[0]


def test_two_streams_at_once_do_not_share_memory(model: PreTrainedModel) -> None:
    options = SamplingOptions(n=8, max_response_length=20)
    expected = [list(engine_of(model).stream([prompt], options)) for prompt in MIXED[:2]]
    engine = engine_of(model)
    engine.generate(MIXED, options)
    streams = [engine.stream([prompt], options) for prompt in MIXED[:2]]
    pairs = list(zip(*streams, strict=True))
    assert [list(responses) for responses in zip(*pairs, strict=True)] == expected


def caches_in_memory() -> int:
    gc.collect()
    return sum(type(thing) is KVCache for thing in gc.get_objects())


def test_a_cache_that_is_too_small_is_freed_before_a_larger_one_is_made(model: PreTrainedModel) -> None:
    """Else a device that is nearly full could not hold the second set of an evaluation whose prompts are longer."""
    engine = engine_of(model, max_concurrent=8)
    engine.generate(MIXED[:1], SamplingOptions(n=1, max_response_length=4))
    before = caches_in_memory()
    stream = engine.stream(MIXED, SamplingOptions(n=2, max_response_length=80))
    next(stream)
    assert caches_in_memory() == before
    stream.close()
    engine.sleep()
    assert caches_in_memory() == before - 1


def test_a_stream_that_is_left_frees_its_cache_or_hands_it_back(model: PreTrainedModel) -> None:
    engine = engine_of(model, max_concurrent=8)
    for asleep in (False, True):
        engine.wake(policy_version=0)
        stream = engine.stream(MIXED, SamplingOptions(n=2, max_response_length=8))
        next(stream)
        if asleep:
            engine.sleep()
        stream.close()
        assert (engine._cache is None) == asleep


def test_length_limit(model: PreTrainedModel) -> None:
    rollouts = engine_of(model, eos_ids=[]).generate(MIXED, SamplingOptions(n=2, max_response_length=7))
    assert rollouts.response_lengths.tolist() == [7] * 12
    assert set(rollouts.finish_reasons) == {"length"}
    assert bool(rollouts.truncated.all())


def test_fault_15_two_eos_ids_end_a_response_and_are_part_of_it(model: PreTrainedModel) -> None:
    eos_ids = TOKENIZER.convert_tokens_to_ids(["7", "q"])
    rollouts = engine_of(model, eos_ids=eos_ids).generate(MIXED, SamplingOptions(n=16, max_response_length=60))
    last = set()
    for row in range(len(rollouts)):
        tokens = rollouts.response_tokens[row, : rollouts.response_lengths[row]].tolist()
        assert bool(rollouts.response_mask[row, len(tokens) - 1])
        assert not set(tokens[:-1]) & set(eos_ids)
        if rollouts.finish_reasons[row] == "stop":
            last.add(tokens[-1])
            assert rollouts.texts[row] == TOKENIZER.decode(tokens[:-1], skip_special_tokens=True)
    assert last == set(eos_ids)


def test_fault_16_the_pad_token_as_eos_stays_in_the_response() -> None:
    pad = TOKENIZER.pad_token_id
    rollouts = engine_of(forced(pad), eos_ids=[pad]).generate(MIXED[:2], SamplingOptions(n=2, max_response_length=9))
    assert rollouts.response_lengths.tolist() == [1] * 4
    assert rollouts.response_mask.tolist() == [[True]] * 4


def test_fault_19_an_empty_response_is_one_eos_token() -> None:
    engine = engine_of(forced(1), max_concurrent=8)
    rollouts = engine.generate(MIXED, SamplingOptions(n=8, max_response_length=9))
    assert rollouts.response_tokens.tolist() == [[1]] * 48
    assert set(rollouts.texts) == {""}
    assert set(rollouts.finish_reasons) == {"stop"}


def test_fault_20_tokens_are_those_sampled_not_those_of_the_text() -> None:
    """Ids beyond the tokenizer's decode to nothing; they stay in the response all the same."""
    beyond = VOCABULARY - 1
    assert beyond >= len(TOKENIZER)
    rollouts = engine_of(forced(beyond)).generate(MIXED[:1], SamplingOptions(n=1, max_response_length=4))
    assert rollouts.response_tokens.tolist() == [[beyond] * 4]
    assert rollouts.texts == ("",)


def test_stop_strings_end_a_response_where_they_are_completed(model: PreTrainedModel) -> None:
    free = by_key(list(engine_of(model, eos_ids=[]).stream(MIXED, SamplingOptions(n=4, max_response_length=30))))
    stop = free[2, 1].text[10:13]  # at least three tokens
    options = SamplingOptions(n=4, max_response_length=30, stop=(stop, "never in there"))
    responses = by_key(list(engine_of(model, eos_ids=[], max_concurrent=8).stream(MIXED, options)))
    stopped = responses[2, 1]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free[2, 1].text[: free[2, 1].text.index(stop)]
    assert stopped.tokens == free[2, 1].tokens[: len(stopped.tokens)]
    assert stop in TOKENIZER.decode(stopped.tokens, skip_special_tokens=True)
    assert stop not in TOKENIZER.decode(stopped.tokens[:-1], skip_special_tokens=True)
    for key, response in responses.items():
        if stop not in free[key].text:
            assert response == free[key]


def test_a_stop_string_of_one_token_may_be_the_first_token() -> None:
    token = TOKENIZER.convert_tokens_to_ids("7")
    options = SamplingOptions(n=3, max_response_length=5, stop=("7",))
    rollouts = engine_of(forced(token)).generate(MIXED, options)
    assert rollouts.response_tokens.tolist() == [[token]] * 18
    assert set(rollouts.texts) == {""}
    assert set(rollouts.finish_reasons) == {"stop"}


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 1e-6}])
def test_top_k_and_top_p_reach_the_sampler(model: PreTrainedModel, changes: dict[str, float]) -> None:
    greedy = engine_of(model).generate(MIXED, SamplingOptions(n=1, max_response_length=15, temperature=0.0))
    options = SamplingOptions(n=1, max_response_length=15, **changes)
    assert engine_of(model).generate(MIXED, options).texts == greedy.texts


def test_a_bound_on_memory_changes_the_slots_and_nothing_else(model: PreTrainedModel) -> None:
    options = SamplingOptions(n=8, max_response_length=20)
    expected = engine_of(model).generate(MIXED, options)
    slot_bytes = 2 * 2 * 2 * 64 * 16 * 4  # layers, keys and values, heads, 60 tokens rounded up, head dim, float32
    engine = engine_of(model, kv_cache_bytes=11 * slot_bytes)
    assert engine.generate(MIXED, options).texts == expected.texts
    with pytest.raises(ModelError, match=r"8 sequences of 64 tokens.*need 0\.001 GiB\n.*kv_cache_gib=0\.001"):
        engine_of(model, kv_cache_bytes=7 * slot_bytes).generate(MIXED, options)


def test_asleep_no_response_can_be_asked_for(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    engine.sleep()
    with pytest.raises(PhaseError, match="asleep"):
        engine.stream(MIXED, SamplingOptions(n=1, max_response_length=1))
    engine.wake(policy_version=3)
    assert engine.generate(MIXED, SamplingOptions(n=1, max_response_length=1)).policy_version == 3


def test_bad_prompts_are_refused_before_anything_runs(model: PreTrainedModel) -> None:
    with pytest.raises(DataError, match=r"rows \[1\]"):
        engine_of(model).stream([MIXED[0], Prompt((), "")], SamplingOptions(n=1, max_response_length=1))
    with pytest.raises(ModelError, match="516 tokens, the model has 512 positions"):
        engine_of(model).stream(MIXED[:1], SamplingOptions(n=1, max_response_length=512))
    assert len(engine_of(model).generate([], SamplingOptions(n=2, max_response_length=4))) == 0


@pytest.mark.parametrize(
    ("architecture", "overrides", "message"),
    [
        ("GPT2LMHeadModel", {"n_positions": 32}, "the model has 32 positions"),
        ("Phi3ForCausalLM", LONGROPE, "the model has 32 positions before its longrope stretches them"),
    ],
)
def test_a_response_past_the_positions_is_refused_whatever_they_are_called(
    architecture: str, overrides: dict[str, object], message: str
) -> None:
    engine = engine_of(tiny_model(architecture, attention="tandem", overrides=overrides))
    prompt = Prompt((5,) * 8, "")
    assert len(engine.generate([prompt], SamplingOptions(n=1, max_response_length=24))) == 1
    with pytest.raises(ModelError, match=f"33 tokens, {message}"):
        engine.stream([prompt], SamplingOptions(n=1, max_response_length=25))


def test_diverged_weights_are_told() -> None:
    policy = tiny_model(attention="tandem")
    with torch.no_grad():
        policy.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        engine_of(policy).generate(MIXED, SamplingOptions(n=1, max_response_length=4))


def test_training_can_follow_and_leaves_nothing_behind() -> None:
    policy = tiny_model("Phi3ForCausalLM", attention="tandem")
    rollouts = engine_of(policy).generate(MIXED[:1], SamplingOptions(n=1, max_response_length=4))
    assert torch.is_grad_enabled()
    assert all(weight.grad is None for weight in policy.parameters())
    embeds = policy.get_input_embeddings()(rollouts.response_tokens)
    (embeds.sum() * rollouts.rollout_logprobs.sum()).backward()
    assert policy.get_input_embeddings().weight.grad is not None


def test_gradients_are_on_for_the_consumer_between_two_responses(model: PreTrainedModel) -> None:
    for _ in engine_of(model).stream(MIXED[:1], SamplingOptions(n=2, max_response_length=4)):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
