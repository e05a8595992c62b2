"""How a function is called follows from its signature."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tandem.errors import RewardError
from tandem.rewards.sample import Sample
from tandem.rewards.signature import accepted_options, plan_call

SAMPLE = Sample("the response", "the prompt", 4, "the source", {"level": 2})


def called(function: Any, options: dict[str, Any] | None = None) -> Any:
    return plan_call(function, "mine", options=options or {}, batched=False)([SAMPLE])


def test_a_verl_function_works_unchanged() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        return data_source, solution_str, ground_truth, extra_info, kwargs

    assert called(compute_score) == ("the source", "the response", 4, {"level": 2}, {})
    assert called(compute_score, {"scale": 3}) == ("the source", "the response", 4, {"level": 2}, {"scale": 3})


@pytest.mark.parametrize("name", ["response", "solution_str", "completion"])
def test_the_response_has_three_names(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def reward({name}): return {name}", scope)
    assert called(scope["reward"]) == "the response"


def test_only_what_the_signature_asks_for_is_given() -> None:
    assert called(lambda prompt, response: (prompt, response)) == ("the prompt", "the response")
    assert called(lambda response, *, extra_info: (response, extra_info)) == ("the response", {"level": 2})
    assert called(lambda response, unknown=5: (response, unknown)) == ("the response", 5)


def test_two_required_parameters_of_other_names_are_response_and_truth() -> None:
    assert called(lambda text, answer: (text, answer)) == ("the response", 4)
    assert called(lambda text, answer, /: (text, answer)) == ("the response", 4)
    assert called(lambda text, answer, prompt="": (text, answer, prompt)) == ("the response", 4, "the prompt")
    assert called(lambda scale, text, answer: (scale, text, answer), {"scale": 2}) == (2, "the response", 4)


def test_callables_of_every_kind() -> None:
    class Judge:
        def __call__(self, response: str, scale: float) -> tuple[str, float]:
            return response, scale

        async def wait(self, response: str) -> None: ...

    async def later(response: str) -> None: ...

    assert called(Judge(), {"scale": 2.0}) == ("the response", 2.0)
    assert called(partial(Judge(), scale=3.0)) == ("the response", 3.0)
    for function, expected in [(later, True), (Judge().wait, True), (partial(later), True), (Judge(), False)]:
        options = {"scale": 1.0} if isinstance(function, Judge) else {}
        assert plan_call(function, "mine", options=options, batched=False).asynchronous is expected


def test_batched_functions_get_lists_and_may_use_the_plural() -> None:
    def compute(data_sources, solution_strs, ground_truths, extra_infos):
        return data_sources, solution_strs, ground_truths, extra_infos

    plan = plan_call(compute, "mine", options={}, batched=True)
    assert plan([SAMPLE, SAMPLE]) == (["the source"] * 2, ["the response"] * 2, [4, 4], [{"level": 2}] * 2)
    assert plan_call(lambda text, truth: (text, truth), "m", options={}, batched=True)([SAMPLE]) == (
        ["the response"],
        [4],
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text: 1, "asks for text"),
        (lambda text, ground_truth: 1, "asks for text"),
        (lambda a, b, c: 1, "asks for a, b, c"),
        (lambda *, a, b: 1, "asks for a, b"),
        (lambda prompt, ground_truth: 1, "does not ask for the response"),
        (lambda **everything: 1, "does not ask for the response"),
        (lambda: 1, "does not ask for the response"),
        (lambda own=1, response="", /: 1, "stands in the way"),
    ],
)
def test_anything_else_is_an_error_that_lists_the_names(function: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        plan_call(function, "mine", options={}, batched=False)
    assert "mine(" in caught.value.message
    assert "response, solution_str, completion, prompt, ground_truth" in str(caught.value.remedy)


def test_a_function_without_a_readable_signature() -> None:
    with pytest.raises(RewardError, match="no signature"):
        plan_call(dict, "dict", options={}, batched=False)


def test_options_that_a_function_takes() -> None:
    assert accepted_options(lambda response, scale=1: 1, "mine", {"scale": 2, "other": 3}) == {"scale": 2}
    assert accepted_options(lambda response, **rest: 1, "mine", {"scale": 2, "other": 3}) == {"scale": 2, "other": 3}
    with pytest.raises(RewardError, match="ground_truth is a name that Tandem fills in itself"):
        plan_call(lambda response, **rest: 1, "mine", options={"ground_truth": 2}, batched=False)


@pytest.mark.parametrize("function", [lambda responses, ground_truths: 1, lambda response, ground_truths: 1])
def test_plural_names_without_batched_are_refused(function: Any) -> None:
    with pytest.raises(RewardError, match="seems to take lists") as caught:
        plan_call(function, "mine", options={}, batched=False)
    assert "reward.batched=true" in str(caught.value.remedy)
