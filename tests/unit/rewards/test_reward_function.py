"""Loading reward functions, and what several of them make together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import RewardError
from tandem.rewards.function import load_reward
from tandem.rewards.sample import Sample, Score


def evaluate(choice: Any, *samples: Sample, **settings: Any) -> list[Score]:
    return asyncio.run(load_reward(choice, **settings).evaluate(samples))


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_function_of_a_file_with_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "WORTH = 3.0", "neighbour_of_mine.py")
    file = write(tmp_path, "from neighbour_of_mine import WORTH\ndef good(response): return WORTH")
    (score,) = evaluate(f"{file}:good", Sample("x"))
    assert score.value == 3.0


def test_a_function_for_each_source_fault_33(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "def plain(response): return 0.5\n"
        "def rich(response): return {'score': 1, 'acc': 1, **({'steps': 4} if response == 'long' else {})}",
    )
    reward = load_reward({"a": f"{file}:plain", "b": f"{file}:rich"})
    scores = [
        asyncio.run(reward.evaluate([Sample(response, data_source=source)]))[0]
        for response, source in [("x", "a"), ("x", "b"), ("long", "b"), ("x", "c")]
    ]
    assert [score.value for score in scores] == [0.5, 1.0, 1.0, None]
    assert [dict(score.metrics) for score in scores] == [
        {},
        {"reward/acc": 1.0},
        {"reward/acc": 1.0, "reward/steps": 4.0},
        {},
    ]
    assert scores[3].error == "no reward function for data_source 'c' (reward.function has: a, b)"


def test_several_functions_make_a_weighted_sum(tmp_path: Path) -> None:
    file = write(tmp_path, "def short(response): return {'score': 1 / len(response), 'length': len(response)}")
    choice = ["exact_match", f"{file}:short"]
    (score,) = evaluate(choice, Sample("4444", ground_truth="4444"), weights={"exact_match": 2.0, "short": 0.5})
    assert score.value == 2.0 * 1 + 0.5 * 0.25
    assert score.metrics == {"reward/exact_match": 1.0, "reward/short": 0.25, "reward/short/length": 4.0}
    (score,) = evaluate(choice, Sample("4444", ground_truth="4444"))
    assert score.value == 1.25
    (score,) = evaluate(choice, Sample("", ground_truth="4"))
    assert score.value is None
    assert "reward function short raised ZeroDivisionError" in str(score.error)


def test_functions_of_the_same_name_are_told_apart_by_their_files(tmp_path: Path) -> None:
    one = write(tmp_path, "def score(response): return 1", "one.py") + ":score"
    two = write(tmp_path, "def score(response): return 2", "two.py") + ":score"
    (score,) = evaluate([one, two], Sample("x"), weights={two: 10.0})
    assert score.value == 21.0
    assert score.metrics == {f"reward/{one}": 1.0, f"reward/{two}": 2.0}


def test_each_function_gets_the_options_that_it_takes(tmp_path: Path) -> None:
    file = write(tmp_path, "def bonus(response, worth): return worth")
    options = {"worth": 5.0, "pattern": "^x"}
    (score,) = evaluate([f"{file}:bonus", "format_regex"], Sample("xy"), options=options)
    assert score.value == 6.0


def test_fault_32_what_a_function_raises_is_shown_with_the_user_s_own_frames(tmp_path: Path) -> None:
    file = write(tmp_path, "def inner(x):\n    return x['no']\ndef outer(response):\n    return inner({})")
    (score,) = evaluate(f"{file}:outer", Sample("x"))
    assert score.value is None
    shown = str(score.error)
    assert shown.startswith("reward function outer raised KeyError: 'no'\n")
    assert [line.strip() for line in shown.splitlines() if "File" in line] == [
        f'File "{file}", line 4, in outer',
        f'File "{file}", line 2, in inner',
    ]


def test_a_batch_is_split_by_source() -> None:
    def count(responses: list[str]) -> list[int]:
        return [len(responses)] * len(responses)

    samples = [Sample("x", data_source=source) for source in "abaab"]
    scores = evaluate(count, *samples, batched=True)
    assert [score.value for score in scores] == [3, 2, 3, 3, 2]


JUDGE = """
made = 0

class Judge:
    def __init__(self, scale, shift=0.0):
        global made
        made += 1
        self.scale, self.shift = scale, shift

    def __call__(self, response, ground_truth):
        return {"score": self.scale * len(response) + self.shift, "made": made}
"""


def test_a_class_is_made_once_with_the_options_and_what_it_makes_is_called(tmp_path: Path) -> None:
    reward = load_reward(f"{write(tmp_path, JUDGE)}:Judge", options={"scale": 2.0})
    scores = [asyncio.run(reward.evaluate([Sample(text)]))[0] for text in ("a", "bb")]
    assert [(score.value, score.metrics) for score in scores] == [
        (2.0, {"reward/made": 1.0}),
        (4.0, {"reward/made": 1.0}),
    ]


def test_classes_and_functions_share_the_options(tmp_path: Path) -> None:
    file = write(tmp_path, JUDGE + "def plain(response, shift): return shift")
    choice = [f"{file}:Judge", f"{file}:plain"]
    (score,) = evaluate(choice, Sample("a"), options={"scale": 2.0, "shift": 10.0}, weights={"plain": 0.1})
    assert score.value == 12.0 + 0.1 * 10.0


@pytest.mark.parametrize(
    ("choice", "settings", "message"),
    [
        ("exact_macht", {}, "did you mean exact_match"),
        ("my_reward", {}, "your own function is file.py:name"),
        ("nowhere.py:score", {}, "there is no file"),
        ("{file}:scoer", {}, "has no 'scoer'\n.*it has score, Judge"),
        ("{file}:NUMBER", {}, "is a int, not a function"),
        ("{broken}:score", {}, "cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
        ("{leaving}:score", {}, "cannot be imported: SystemExit"),
        (["{file}:score", "{file}:score"], {}, "twice"),
        ("{file}:score", {"weights": {"score": 2.0}}, "no effect"),
        (
            ["{file}:score", "exact_match"],
            {"weights": {"exact": 2.0}},
            "there is no function exact\n.*score, exact_match",
        ),
        ("{file}:score", {"options": {"scale": 2.0}}, "no reward function takes scale"),
        ("{file}:Judge", {}, "reward class Judge: what it makes cannot be called"),
        ("{classes}:Picky", {"options": {"model": "m", "scale": 2.0}}, "there is no m"),
        ("{classes}:Picky", {}, "(?s)Picky cannot be made.*missing 1 required.*'model'.*mend the options"),
        ("{classes}:Picky", {"options": {"model": "m"}}, "(?s)ValueError: there is no m.*reward.memory_gib"),
        ("{classes}:Deaf", {}, "Deaf.*does not ask for the response"),
        ("format_regex", {}, "asks for pattern"),
        ("format_regex", {"options": {"pattern": "("}}, "is not a regular expression"),
        ("format_regex", {"options": {"pattern": 4}}, "is 4, not a regular expression"),
        (["exact_macht", "nowhere.py:score"], {}, "(?s)exact_macht.*nowhere.py"),
    ],
)
def test_what_cannot_be_loaded_says_why(tmp_path: Path, choice: Any, settings: Any, message: str) -> None:
    files = {
        "file": write(tmp_path, "NUMBER = 3\ndef score(response): return 1\nclass Judge: pass", "file.py"),
        "classes": write(
            tmp_path,
            "class Picky:\n    def __init__(self, model): raise ValueError(f'there is no {model}')\n"
            "class Deaf:\n    def __call__(self, ground_truth): return 1\n",
            "classes.py",
        ),
        "broken": write(tmp_path, "import not_there", "broken.py"),
        "leaving": write(tmp_path, "raise SystemExit(3)", "leaving.py"),
    }
    filled = choice.format(**files) if isinstance(choice, str) else [text.format(**files) for text in choice]
    with pytest.raises(RewardError, match=message):
        load_reward(filled, **settings)


def test_of_the_frames_of_libraries_one_line_is_shown(tmp_path: Path) -> None:
    file = write(tmp_path, "import json\ndef mine(response):\n    return json.loads(response)\n")
    (score,) = evaluate(f"{file}:mine", Sample("{"))
    first, *frames = str(score.error).splitlines()
    assert first.startswith("reward function mine raised json.decoder.JSONDecodeError: ")
    assert f'File "{file}", line 3, in mine' in frames[0]
    assert [line for line in frames if "json" in line and file not in line and "File" in line] == frames[-1:]
    assert frames[-1].endswith("in raw_decode") or frames[-1].endswith("in decode")
