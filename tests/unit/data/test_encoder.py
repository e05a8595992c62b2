"""Prompts as tokens: special tokens, the length limit, the checks of each row."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.config.data import DataConfig
from tandem.data.encoder import EncodedPrompt, PromptEncoder
from tandem.data.files import Row
from tandem.data.problems import Problems
from tandem.errors import DataError
from tests.tiny import BOS_TOKEN, tiny_tokenizer

QUESTION = [{"role": "user", "content": "1+1?"}]


def encode(*prompts: object, tokenizer: PreTrainedTokenizerFast, **options: Any) -> list[EncodedPrompt | None]:
    rows = [Row({"prompt": prompt}, f"train.jsonl, line {line}") for line, prompt in enumerate(prompts, 1)]
    problems = Problems()
    encoded = PromptEncoder(tokenizer, DataConfig(**options)).encode(rows, problems)
    problems.raise_if_any()
    return encoded


def tokens_of(prompt: object, tokenizer: PreTrainedTokenizerFast, **options: Any) -> list[int]:
    (encoded,) = encode(prompt, tokenizer=tokenizer, **options)
    assert encoded is not None
    return list(encoded.tokens)


def test_tokens_are_those_of_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    assert tokens_of("12+3=", tokenizer) == tokenizer("12+3=")["input_ids"]
    templated = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert tokens_of(QUESTION, tokenizer) == templated


@pytest.mark.parametrize("prompt", [QUESTION, "1+1?", f"{BOS_TOKEN}user: 1+1?\nassistant: "])
def test_fault_17_template_and_tokenizer_both_write_bos(prompt: object) -> None:
    tokenizer = tiny_tokenizer(bos=True)
    tokens = tokens_of(prompt, tokenizer)
    assert tokens.count(tokenizer.bos_token_id) == 1
    assert tokens[0] == tokenizer.bos_token_id


def test_fault_17_a_template_without_bos_gets_none() -> None:
    tokenizer = tiny_tokenizer(bos=True, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert tokenizer.bos_token_id not in tokens_of(QUESTION, tokenizer)


@pytest.mark.parametrize("prompt", ["1+1=\ud83d", [{"role": "user", "content": "\ud83d"}]])
def test_half_of_a_surrogate_pair_is_an_error_that_names_the_row(prompt: object) -> None:
    with pytest.raises(DataError, match=r"train.jsonl, line 2: half of a surrogate pair .*ud83d"):
        encode("fine", prompt, tokenizer=tiny_tokenizer())


def test_raw_and_templated_prompts_in_one_file_keep_their_order() -> None:
    tokenizer = tiny_tokenizer()
    encoded = encode("1+1=", QUESTION, "2+2=", tokenizer=tokenizer)
    texts = [prompt.text for prompt in encoded if prompt is not None]
    assert texts == ["1+1=", "user: 1+1?\nassistant: ", "2+2="]
    assert [tokenizer.decode(prompt.tokens) for prompt in encoded if prompt is not None] == texts


@pytest.mark.parametrize(
    ("over_length", "text"), [("left", "56789"), ("right", "01234"), ("middle", "01789"), ("filter", None)]
)
def test_fault_24_prompt_over_the_limit(over_length: str, text: str | None) -> None:
    short, long = encode(
        "12345", "0123456789", tokenizer=tiny_tokenizer(), max_prompt_length=5, over_length=over_length
    )
    assert short is not None
    assert short.text == "12345"
    if text is None:
        assert long is None
    else:
        assert long is not None
        assert long.text == text
        assert list(long.tokens) == tiny_tokenizer()(text)["input_ids"]


def test_fault_24_error_names_rows_and_lengths() -> None:
    with pytest.raises(DataError) as caught:
        encode("123", "123456", "1234567", tokenizer=tiny_tokenizer(), max_prompt_length=3, over_length="error")
    message = str(caught.value)
    assert "train.jsonl, line 2: the prompt has 6 tokens, more than data.max_prompt_length=3" in message
    assert "train.jsonl, line 3: the prompt has 7 tokens" in message
    assert message.count("raise data.max_prompt_length") == 1


def test_the_limit_counts_the_template() -> None:
    tokenizer = tiny_tokenizer()
    length = len("user: 1+1?\nassistant: ")
    assert encode(QUESTION, tokenizer=tokenizer, max_prompt_length=length)[0] is not None
    assert encode(QUESTION, tokenizer=tokenizer, max_prompt_length=length - 1)[0] is None


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match="line 2: the prompt is empty"):
        encode("a", "", tokenizer=tiny_tokenizer())


def test_faulty_rows_are_reported_together_up_to_a_handful() -> None:
    with pytest.raises(DataError) as caught:
        encode("a", 1, 2, [], tokenizer=tiny_tokenizer())
    assert [f"line {line}: " in str(caught.value) for line in (1, 2, 3, 4)] == [False, True, True, True]
    with pytest.raises(DataError, match="there may be more"):
        encode(*range(100), tokenizer=tiny_tokenizer())


def test_a_character_without_a_token_is_named_with_its_row() -> None:
    with pytest.raises(DataError) as caught:
        encode("1+1=", "2×2=é", tokenizer=tiny_tokenizer())
    assert "train.jsonl, line 2: the tokenizer has no token for '×', 'é'" in str(caught.value)
    assert "model.tokenizer.characters" in str(caught.value)


def test_special_tokens_in_a_text_are_no_unknown_characters() -> None:
    tokenizer = tiny_tokenizer(characters="12+=", bos=True, chat_template=None)
    tokens = tokens_of(f"{BOS_TOKEN}1+2=", tokenizer)
    assert tokens[0] == tokenizer.bos_token_id
    assert len(tokens) == 5


def test_an_unknown_token_stands_for_what_has_none() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert tokens_of("one two", PreTrainedTokenizerFast(tokenizer_object=backend)) == [1, 0]


def test_a_tokenizer_of_words_names_the_words_that_it_lacks() -> None:
    backend = Tokenizer(models.WordLevel({"one": 0, "two": 1}))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokens_of("One two", tokenizer) == [0, 1]
    with pytest.raises(DataError, match="no token for 'three'"):
        encode("one three", tokenizer=tokenizer)
