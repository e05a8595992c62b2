"""Supervised examples: prompt and response tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.config.data import DataConfig
from tandem.data.examples import Example, check_examples, load_examples
from tandem.errors import DataError, ModelError
from tests.tiny import tiny_tokenizer, write_jsonl

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text)["input_ids"])


def load(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> tuple[Example, ...]:
    return load_examples(write_jsonl(tmp_path / "sft.jsonl", rows), TOKENIZER, DataConfig(**options))


@pytest.mark.parametrize("column", ["response", "answer", "completion"])
def test_response_columns(tmp_path: Path, column: str) -> None:
    (example,) = load(tmp_path, {"prompt": "07+45=", column: "052"})
    assert example == Example(ids("07+45="), (*ids("052"), EOS))


def test_response_comes_before_answer(tmp_path: Path) -> None:
    (example,) = load(tmp_path, {"prompt": "1+1=", "answer": "2", "response": "1+1 is 2"})
    assert example.response_tokens == (*ids("1+1 is 2"), EOS)


def test_fault_18_answer_of_one_token_stays(tmp_path: Path) -> None:
    (example,) = load(tmp_path, {"prompt": "1+1=", "response": "2"})
    assert example.response_tokens == (*ids("2"), EOS)


def test_empty_answer_is_eos_alone_and_a_number_is_its_digits(tmp_path: Path) -> None:
    empty, number = load(tmp_path, {"prompt": "a", "response": ""}, {"prompt": "1+1=", "answer": 2})
    assert empty.response_tokens == (EOS,)
    assert number.response_tokens == (*ids("2"), EOS)


def test_eos_that_is_already_there_is_not_doubled(tmp_path: Path) -> None:
    (example,) = load(tmp_path, {"prompt": "1+1=", "response": f"2{TOKENIZER.eos_token}"})
    assert example.response_tokens == (*ids("2"), EOS)


def test_response_gets_no_bos(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(bos=True)
    path = write_jsonl(tmp_path / "sft.jsonl", [{"prompt": "1+1=", "response": "2"}])
    (example,) = load_examples(path, tokenizer)
    assert example.prompt_tokens[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in example.response_tokens


def test_prompt_goes_through_the_same_template_and_limit(tmp_path: Path) -> None:
    short, long = ({"prompt": [{"role": "user", "content": text}], "response": "2"} for text in ("1+1?", "1" * 50))
    (example,) = load(tmp_path, short, long, max_prompt_length=30)
    assert example.prompt_tokens == ids("user: 1+1?\nassistant: ")
    with pytest.raises(DataError, match="all 2 prompts have more tokens"):
        load(tmp_path, short, long, max_prompt_length=5)


def test_rows_without_a_usable_response_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(
            tmp_path, {"prompt": "a", "label": "b"}, {"prompt": "a", "response": ["b"]}, {"prompt": "a", "answer": True}
        )
    message = str(caught.value)
    assert "line 1: no response in any of response, answer, completion; the columns are prompt, label" in message
    assert "line 2: 'response' is a text, but this one is of type list" in message
    assert "line 3: 'answer' is a text, but this one is of type bool" in message


def test_the_first_row_is_checked_without_a_tokenizer(tmp_path: Path) -> None:
    check_examples(write_jsonl(tmp_path / "good.jsonl", [{"prompt": "a", "response": "b"}]))
    with pytest.raises(DataError, match="no response in any of"):
        check_examples(write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "a", "label": "b"}]))
    with pytest.raises(DataError, match="no column 'q'"):
        check_examples(tmp_path / "good.jsonl", DataConfig(prompt_key="q"))


def test_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    path = write_jsonl(tmp_path / "sft.jsonl", [{"prompt": "1+1=", "response": "2"}])
    with pytest.raises(ModelError, match="has no EOS token"):
        load_examples(path, tokenizer)


def test_a_response_with_a_character_that_has_no_token_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2: the tokenizer has no token for 'é'"):
        load(tmp_path, {"prompt": "a", "response": "b"}, {"prompt": "a", "response": "é"})
