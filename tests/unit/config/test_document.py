from __future__ import annotations

import math
from pathlib import Path

import pytest

from tandem.config.document import Given, read_file, read_text, read_value, write_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-1E+3", -1000.0),
        (".5", 0.5),
        ("3.", 3.0),
        (".inf", math.inf),
        ("12", 12),
        ("+12", 12),
        ("012", 12),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("off", "off"),
        ("null", None),
        ("~", None),
        ("", None),
        ('"1e-5"', "1e-5"),
        ("'null'", "null"),
        ("!!str 5", "5"),
        ("my_reward.py:compute_score", "my_reward.py:compute_score"),
    ],
)
def test_scalars_are_read_as_yaml_1_2(text: str, value: object):
    given = read_text(f"a: {text}\n", "run.yaml")
    assert given.values == {"a": value}
    assert type(given.values["a"]) is type(value)
    assert given.problems == []


def test_each_key_knows_its_line():
    given = read_text("# a comment\nrollout:\n  n: 4\n\n  stop:\n    - x\n", "run.yaml")
    assert given.where(("rollout", "n")) == "run.yaml:3"
    assert given.where(("rollout", "stop", "0")) == "run.yaml:5"
    assert given.where(("rollout", "top_p")) == "run.yaml:2"
    assert given.where(("data", "train")) is None


def test_a_key_given_twice_is_a_problem_that_names_both_lines():
    given = read_text("rollout:\n  n: 4\n  n: 8\n", "run.yaml")
    assert [str(problem) for problem in given.problems] == [
        "run.yaml:3: rollout.n: is given twice, first in run.yaml:2\n      -> keep one of them"
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rollout:\n\tn: 4\n", "run.yaml:2: YAML: cannot be read"),
        ("a: &x [1]\nb: *x\n", "run.yaml:2: YAML: cannot be read: aliases (*name) are not supported"),
        ("- 1\n", "run.yaml: holds no `section:`"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: YAML: cannot be read"),
        ("a: !!python/name:os.system x\n", "run.yaml:1: a: has the tag tag:yaml.org,2002:python/name:os.system"),
        ("a: !!int x\n", "run.yaml:1: a: has the tag tag:yaml.org,2002:int"),
        ("[1]: 2\n", "run.yaml:1: YAML: has a key that is no plain text"),
        ("a: \x07\n", "run.yaml: YAML: cannot be read"),
    ],
)
def test_what_is_no_config_is_a_problem(text: str, part: str):
    given = read_text(text, "run.yaml")
    assert len(given.problems) == 1
    assert str(given.problems[0]).startswith(part)


def test_an_empty_file_is_an_empty_config():
    assert read_text("# nothing\n", "run.yaml") == Given()


def test_a_file_that_cannot_be_read_is_a_problem_that_says_why(tmp_path: Path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    missing = read_file(tmp_path / "missing.yaml")
    assert "cannot be read: No such file or directory" in str(missing.problems[0])
    assert "cannot be read: Is a directory" in str(read_file(tmp_path).problems[0])
    assert "is not UTF-8 text" in str(read_file(tmp_path / "binary.yaml").problems[0])
    assert not missing.is_complete


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("[1, a]", [1, "a"]),
        ("{a: 1}", {"a": 1}),
        ("Answer: a number", "Answer: a number"),
        ("- x", "- x"),
        ("#1", "#1"),
        ('"a: b"', "a: b"),
        ("'#'", "#"),
        (" 1e-5", 1e-5),
        ("~", None),
        ("true", True),
        ("Put the answer after #### at the end", "Put the answer after #### at the end"),
        ('"Yes" # or no', '"Yes" # or no'),
        ("[a] # b", "[a] # b"),
        ("---", "---"),
        ("%a", "%a"),
        ("a\nb", "a\nb"),
        ("  ", "  "),
    ],
)
def test_values_of_the_command_line_are_yaml_in_brackets_and_quotes_and_plain_otherwise(text: str, value: object):
    given = Given()
    assert read_value(text, ("a", "b"), given) == value
    assert given.where(("a", "b")) == "command line"
    assert given.problems == []


def test_texts_survive_writing_and_reading_whatever_they_look_like():
    texts = [
        "yes",
        "1e-5",
        "1_0",
        "null",
        "~",
        "a: b",
        "a #b",
        " x ",
        "\n",
        "",
        "é",
        "- a",
        "*a",
        "2024-01-01",
        "'",
        "0x1",
    ]
    values = {"a": {"texts": texts, "numbers": [1e-6, 1, 0.5, -2e30], "empty": {}, "nested": [{"b": [True, None]}]}}
    given = read_text(write_text(values), "run.yaml")
    assert given.problems == []
    assert given.values == values
