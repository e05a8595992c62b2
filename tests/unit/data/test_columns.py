"""verl's schema and flat columns; ground truth of any type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tandem.data.columns import column, data_source_of, ground_truth_of, prompt_of
from tandem.data.files import Row
from tandem.errors import DataError
from tests.tiny import addition_rows


def row_of(**values: Any) -> Row:
    return Row(values, "train.parquet, row 3")


def test_verl_schema() -> None:
    row = row_of(**addition_rows(1)[0])
    assert prompt_of(row, "prompt") == [{"role": "user", "content": "What is 0 + 0?"}]
    assert ground_truth_of(row, "auto") == "0"
    assert data_source_of(row, "data_source") == "addition"


@pytest.mark.parametrize("name", ["reward_model/ground_truth", "ground_truth", "answer"])
def test_flat_columns(name: str) -> None:
    assert ground_truth_of(Row({"prompt": "1+1=", name: "2"}, "x"), "auto") == "2"


def test_auto_takes_the_first_candidate_in_their_order() -> None:
    row = row_of(answer="d", ground_truth="c", reward_model={"style": "rule"})
    assert ground_truth_of(row, "auto") == "c"
    assert ground_truth_of(row, "answer") == "d"
    assert ground_truth_of(row, "reward_model.style") == "rule"


@pytest.mark.parametrize("truth", [4, [1, 2], [[1], [2, 3]], np.array([1.5, 2.0]), {"low": 1, "high": 2}, None])
def test_fault_35_ground_truth_of_any_type_arrives_unchanged(truth: object) -> None:
    assert ground_truth_of(row_of(ground_truth=truth), "auto") is truth
    assert ground_truth_of(row_of(reward_model={"ground_truth": truth}), "auto") is truth


def test_no_ground_truth_is_an_error_unless_it_is_said_that_there_is_none() -> None:
    row = row_of(prompt="a", label=4)
    with pytest.raises(DataError, match=r"train.parquet, row 3: no ground truth .* the columns are prompt, label"):
        ground_truth_of(row, "auto")
    assert ground_truth_of(row, "none") is None


def test_fault_37_missing_column_names_those_that_exist_and_the_setting() -> None:
    row = row_of(question="a", answer="b")
    with pytest.raises(DataError) as caught:
        prompt_of(row, "prompt")
    assert "train.parquet, row 3: no column 'prompt'; the columns are question, answer" in str(caught.value)
    assert "data.prompt_key" in str(caught.value)
    with pytest.raises(DataError, match=r"data\.truth_key"):
        ground_truth_of(row, "answers")


def test_a_column_whose_name_has_a_dot_comes_before_a_nested_one() -> None:
    row = Row({"a.b": 1, "a": {"b": 2, "c": {"d": 3}}}, "x")
    assert column(row, "a.b", "data.prompt_key") == 1
    assert column(row, "a.c.d", "data.prompt_key") == 3
    with pytest.raises(DataError, match=r"no column 'a\.x\.d'"):
        column(row, "a.x.d", "data.prompt_key")


def test_source_column_is_optional_only_by_its_default_name() -> None:
    assert data_source_of(row_of(prompt="a"), "data_source") == ""
    assert data_source_of(row_of(data_source=None), "data_source") == ""
    assert data_source_of(row_of(origin="gsm8k"), "origin") == "gsm8k"
    with pytest.raises(DataError, match=r"no column 'origin'"):
        data_source_of(row_of(prompt="a"), "origin")
    with pytest.raises(DataError, match=r"row 3: 'data_source' is a name, but this one is of type int"):
        data_source_of(row_of(data_source=3), "data_source")


def test_rows_with_images_are_refused() -> None:
    with pytest.raises(DataError, match="column 'images' is not empty; Tandem trains on text only"):
        prompt_of(row_of(prompt="<image> What is this?", images=[b"png"]), "prompt")
    assert prompt_of(row_of(prompt="a", images=[], video=None), "prompt") == "a"
