"""The built-in reward for mathematical answers."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.rewards.maths import find_boxes, maths

RIGHT = [
    (r"so \boxed{\frac12}", r"\frac{1}{2}"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{10\%}", "10"),
    (r"\boxed{10\%}", "0.1"),
    (r"\boxed{1,234}", 1234),
    (r"\boxed{72.}", ["72"]),
    (r"\boxed{\$72}", 72),
    (r"\boxed{1} no, \boxed{4}", 4),
    (r"\boxed{1} and \boxed{4}", "1,4"),
    (r"\fbox{4}", "4"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{x^{2}+1}", "1+x^2"),
    (r"\boxed{2\sqrt2}", r"$\sqrt{8}$"),
    (r"\boxed{\text{Evelyn}}", "Evelyn"),
    (r"\boxed{\text{(B)}}", "B"),
    (r"\boxed{(1,2)}", "(1, 2)"),
    (r"\boxed{4}", r"They are \boxed{4}."),
    ("the answer is $4$", "4"),
    ("so it is 4.", 4),
]
WRONG = [
    (r"\boxed{\frac13}", r"\frac{1}{2}"),
    (r"\boxed{4", "4"),
    (r"\boxed{}", "4"),
    (r"\boxed{4} no, \boxed{1}", 4),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{seat}", "east"),
    (r"\boxed{\text{west}}", r"\text{east}"),
    ("", "4"),
    (r"\boxed{{{{", "4"),
]


@pytest.mark.parametrize(("response", "truth"), RIGHT)
def test_fault_36_right(response: str, truth: Any) -> None:
    assert maths(response, truth) == 1.0


@pytest.mark.parametrize(("response", "truth"), WRONG)
def test_fault_36_wrong(response: str, truth: Any) -> None:
    assert maths(response, truth) == 0.0


def test_boxes_in_the_order_in_which_they_close() -> None:
    text = r"\boxed{a} \{ \fbox{b\boxed{c}{d}} \boxed {e. } } \boxed{f"
    assert find_boxes(text) == ["a", "c", r"b\boxed{c}{d}", "e"]
