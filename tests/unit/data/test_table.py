"""Tables of tokenised prompts."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np

from tandem.config.data import DataConfig
from tandem.data.table import PromptTable, load_table
from tests.tiny import tiny_tokenizer, write_jsonl

TOKENIZER = tiny_tokenizer()


def table_of(tmp_path: Path, *prompts: str, max_rows: int | None = None) -> PromptTable:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": len(prompt)} for prompt in prompts])
    return load_table(str(path), TOKENIZER, DataConfig(max_prompt_length=4), max_rows=max_rows)


def test_prompts_come_out_as_they_went_in_without_those_that_are_too_long(tmp_path: Path) -> None:
    table = table_of(tmp_path, "a", "too long", "abcd", "bc")
    prompts = [table.prompt(row, prompt_id=10 + row) for row in range(len(table))]
    assert table.num_dropped == 1
    assert [prompt.text for prompt in prompts] == ["a", "abcd", "bc"]
    assert [prompt.tokens for prompt in prompts] == [
        tuple(TOKENIZER(text)["input_ids"]) for text in ("a", "abcd", "bc")
    ]
    assert [(prompt.ground_truth, prompt.prompt_id) for prompt in prompts] == [(1, 10), (4, 11), (2, 12)]


def test_rows_beyond_one_tokenizer_call_keep_their_order(tmp_path: Path) -> None:
    table = table_of(tmp_path, *(str(index) for index in range(2100)))
    assert [table.prompt(row, 0).text for row in (0, 1023, 1024, 2099)] == ["0", "1023", "1024", "2099"]
    assert len(table_of(tmp_path, "a", "b", "c", max_rows=2)) == 2


def test_digest_sees_tokens_and_where_prompts_end(tmp_path: Path) -> None:
    digest = table_of(tmp_path, "ab", "c").digest
    assert table_of(tmp_path, "ab", "c").digest == digest
    assert table_of(tmp_path, "ab", "d").digest != digest
    assert table_of(tmp_path, "a", "bc").digest != digest


def test_truth_digest_sees_ground_truths_and_their_source_of_any_kind() -> None:
    endless: list[object] = []
    endless.append(endless)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]

    def digest(truth: object, **columns: object) -> int:
        rows = [{"prompt": "1", "answer": truth, **columns}]
        return load_table(rows, TOKENIZER, DataConfig(max_prompt_length=4)).truth_digest

    truths = ["7", 7, 7.5, None, ["7"], {"a": 1}, {"a": 2}, Decimal(7), date(2020, 1, 1), np.array([7]), b"7", endless]
    assert len({digest(truth) for truth in truths}) == len(truths)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(object()) == digest(object())
    assert digest("7", data_source="sums") != digest("7")
    assert digest(10**5000) != digest(7)
    assert digest(deep) == digest(endless)
