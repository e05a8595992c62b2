from __future__ import annotations

import json
import math

import pytest

from tandem.batch import Evaluation
from tandem.errors import ConfigError
from tandem.observe.best import Best


def evaluation(step: int, value: float) -> Evaluation:
    return Evaluation(step=step, metrics={"pass@1": value, "pass@1_stderr": 0.1}, num_prompts=10)


def test_the_best_is_the_highest_and_the_first_of_equals() -> None:
    best = Best("pass@1", None)
    seen = [best.observe(evaluation(step, value)) for step, value in enumerate((0.5, 0.4, 0.6, 0.6, math.nan))]
    assert seen == [True, False, True, False, False]
    assert (best.step, best.value, best.without_gain) == (2, 0.6, 2)
    assert best.before["pass@1"] == 0.5
    assert best.latest_step == 4
    assert not best.patience_is_out


def test_patience_counts_evaluations_in_a_row() -> None:
    best = Best("pass@1", 2)
    out = []
    for step, value in enumerate((0.5, 0.4, 0.6, 0.5, 0.6)):
        best.observe(evaluation(step, value))
        out.append(best.patience_is_out)
    assert out == [False, False, False, False, True]


@pytest.mark.parametrize("values", [(0.5, 0.4), (math.nan,), ()])
def test_state_goes_through_json(values: tuple[float, ...]) -> None:
    best = Best("pass@1", 3)
    for step, value in enumerate(values):
        best.observe(evaluation(step, value))
    again = Best("pass@1", 3)
    state = json.loads(json.dumps(best.state_dict(), allow_nan=False))
    again.load_state_dict(state)
    assert (again.step, again.value, again.without_gain) == (best.step, best.value, best.without_gain)
    for name in ("pass@1", "pass@1_stderr"):
        assert again.before.get(name) == pytest.approx(best.before.get(name), nan_ok=True)
        assert again.latest.get(name) == pytest.approx(best.latest.get(name), nan_ok=True)
    assert again.latest_step == best.latest_step
    assert again.observe(evaluation(9, 0.45)) == best.observe(evaluation(9, 0.45))


def test_a_run_that_goes_on_by_another_metric_has_no_best_yet() -> None:
    best = Best("pass@1", 1)
    best.observe(evaluation(1, 0.5))
    best.observe(evaluation(2, 0.4))
    other = Best("pass@1_stderr", 1)
    other.load_state_dict(best.state_dict())
    assert (other.step, other.without_gain) == (None, 0)
    assert (other.before, other.latest, other.latest_step) == (best.before, best.latest, 2)


def test_an_unknown_metric_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"pass@8 was not measured(.|\n)*use one of pass@1$"):
        Best("pass@8", None).observe(evaluation(0, 0.5))


def test_before_is_the_evaluation_before_the_first_step_and_no_later_one() -> None:
    best = Best("pass@1", None)
    best.observe(evaluation(3, 0.5))
    assert best.before == {}
    best.observe(evaluation(0, 0.25))
    assert best.before["pass@1"] == 0.25
