"""Stop strings, in text whose tokens are several characters long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from transformers import AddedToken, PreTrainedTokenizerFast

from tandem.batch import Prompt
from tandem.errors import ModelError
from tandem.hybrid.start import start
from tandem.model.attention import register
from tandem.rollout.embedded import EmbeddedEngine
from tandem.rollout.options import SamplingOptions
from tandem.rollout.stop import StopStrings, split_stop
from tests.tiny import tiny_model, tiny_tokenizer

PIECES = ["Ans", "wer", ": 4", "2\n", "\nQ", "x"]


def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(PIECES[token] for token in tokens) for tokens in sequences]


def test_a_stop_string_that_spans_tokens_is_found() -> None:
    stop = StopStrings(("\n\n", "END"), decode)
    assert stop.found([[0, 1, 2, 3], [0, 1, 2, 3, 4], [5]]) == [False, True, False]
    assert stop.window >= 4


def test_text_is_cut_at_the_first_stop_string() -> None:
    stop = StopStrings(("42", "wer"), decode)
    assert stop.cut("Answer: 42\n") == ("Ans", True)
    assert stop.cut("nothing") == ("nothing", False)


def with_turns() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True), AddedToken("<think>", special=False)])
    return tokenizer


def test_a_special_token_by_itself_is_an_end_and_other_texts_are_searched_for() -> None:
    tokenizer = with_turns()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert split_stop(("\n\n", "<|end|>", "<think>"), tokenizer) == ((end,), ("\n\n", "<think>"))


def test_a_special_token_among_other_text_is_refused() -> None:
    with pytest.raises(ModelError, match=r"rollout\.stop: .*'x<\|end\|>' holds <\|end\|>, '<\|end\|>\\n' holds"):
        split_stop(("x<|end|>", "<|end|>\n", "a"), with_turns())


def test_a_stop_string_that_cannot_be_found_is_refused_before_the_start() -> None:
    new = {"architecture": "Qwen3ForCausalLM", "hidden_size": 8, "num_hidden_layers": 1}
    config = {"model": {"new": new, "tokenizer": {"characters": "01"}}, "rollout": {"stop": ["<eos>\n"]}}
    with pytest.raises(ModelError, match=r"rollout\.stop: .*holds <eos>"):
        start(config=config)


def test_a_response_ends_with_a_special_token_that_is_a_stop_string() -> None:
    register()
    tokenizer = tiny_tokenizer()
    model = tiny_model(attention="tandem")
    prompts = [Prompt(tuple(tokenizer.encode("2+2=")), "2+2=")]
    eos = tokenizer.eos_token_id
    engine = EmbeddedEngine(model, tokenizer, eos_ids=())
    options = SamplingOptions(n=64, max_response_length=40)
    free = engine.generate(prompts, options)
    stopped = engine.generate(prompts, replace(options, stop=(tokenizer.eos_token,)))
    by_eos = EmbeddedEngine(model, tokenizer, eos_ids=(eos,)).generate(prompts, options)
    assert stopped.response_tokens.tolist() == by_eos.response_tokens.tolist()
    assert (stopped.texts, stopped.finish_reasons) == (by_eos.texts, by_eos.finish_reasons)
    assert set(free.finish_reasons) == {"length"}
    assert "stop" in stopped.finish_reasons


def test_without_stop_strings_nothing_is_to_be_done() -> None:
    assert not StopStrings((), decode)
    assert StopStrings(("a",), decode)
