"""The built-in rewards against verl's scorers on the same texts; where they differ, why ours is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import RewardError
from tandem.rewards.maths import maths
from tandem.rewards.numbers import exact_match, last_number

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "verl.json").read_text())["vectors"]
SCORES = {vector["id"]: vector for vector in VECTORS if vector["id"].startswith("score/")}

# verl's strict GSM8K scorer (the default for that data set) gives 0; so does `flexible` where noted.
GSM8K_DIFFERENCES = {
    "#### $72": "a currency sign does not make 72 wrong",
    "#### 72.": "neither does a full stop (flexible gives 0 too)",
    "72": "the answer is right; whether it has the mark is for format_regex to say",
    "####72": "a space after the mark is nobody's answer",
    "#### 5 " + "x" * 400: "verl reads the last 300 characters only, and so misses the answer",
}
# The three maths scorers of verl contradict each other on most of these; ours gives a person's judgement.
MATHS = {
    ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"): 1.0,
    ("\\boxed{0.5}", "\\frac{1}{2}"): 1.0,  # math_dapo: -1, it compares texts
    ("no box 4", "4"): 1.0,  # all: 0, they want the box; that is a matter of form
    ("\\boxed{1} \\boxed{4}", "4"): 1.0,
    ("\\boxed{ 4 }", "4"): 1.0,  # math_dapo: -1, because of the spaces
    ("\\boxed{x^{2}+1}", "x^2+1"): 1.0,  # all: wrong, because of the braces
    ("\\boxed{10\\%}", "10"): 1.0,  # math_dapo: -1
    ("\\fbox{4}", "4"): 1.0,  # math_reward: 0
    ("\\boxed{4", "4"): 0.0,  # prime_math: right, although the answer may have been cut off
    ("Answer: 4", "4"): 1.0,
    ("Answer: $4$", "4"): 1.0,
    ("Answer: \\frac{1}{2}", "0.5"): 1.0,  # math_dapo: -1, it compares texts
    ("answer: 4", "4"): 1.0,
    ("The result is 4", "4"): 1.0,  # math_dapo: -1, it wants the word "Answer"
}


def of(function: str) -> list[Any]:
    """The inputs and the output of each vector whose id begins so."""
    return [pytest.param(v["inputs"]["literal"], v.get("output"), id=i) for i, v in SCORES.items() if function in i]


def test_every_vector_is_looked_at() -> None:
    families = ("score/gsm8k", "score/math ", "score/math_dapo", "score/search_r1", "score/default")
    assert all(vector.startswith(families) for vector in SCORES)
    assert len(SCORES) == 30


@pytest.mark.parametrize(("inputs", "output"), of("score/gsm8k"))
def test_gsm8k(inputs: list[str], output: dict[str, float]) -> None:
    response, truth = inputs
    ours = last_number(response, truth)
    assert ours == 1.0  # a person finds all of these right
    assert (ours != output["strict"]) == (response in GSM8K_DIFFERENCES)


@pytest.mark.parametrize(("inputs", "output"), of("score/math"))
def test_maths(inputs: list[str], output: Any) -> None:
    response, truth = inputs
    assert maths(response, truth) == MATHS[response, truth]


@pytest.mark.parametrize(("inputs", "output"), of("score/search_r1"))
def test_search_answers_are_the_users_own_function(inputs: list[Any], output: float) -> None:
    """verl's scorer takes the last <answer> and lowers its case; exact_match takes the whole response as it is.

    It reads verl's {"target": [...]}, which is what such a function of the user's would be given.
    """
    response, truth = inputs
    answer = response.rpartition("<answer>")[2].partition("</answer>")[0].lower()
    assert exact_match(answer, truth) == output


@pytest.mark.parametrize(("inputs", "output"), of("score/default"))
def test_default(inputs: list[Any], output: Any) -> None:
    source, response, truth = inputs
    if source == "openai/gsm8k" and truth is None:
        with pytest.raises(RewardError):  # verl: a silent 0; ours has no score, and says why
            last_number(response, truth)
    elif source == "openai/gsm8k":
        assert last_number(response, truth) == 1.0  # verl: 0 for the truths 4 and ["4"]
    elif source == "aime2024":
        assert maths(response, truth) == 1.0 == output["score"]
    else:
        assert output is None  # verl raises for a source without a scorer; so does `reward.function` of a dict
