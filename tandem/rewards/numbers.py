"""Built-in rewards that compare the response, or its last number, with the ground truth."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

from tandem.errors import RewardError

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
# A minus sign is a sign unless it follows a number, a letter or a closing bracket: 5-3, x-3, (a)-3.
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}])[-+\u2212])? \\?[$€£]? (?P<inner_sign>(?<=[$€£])[-\u2212])?
    (?P<body>{_DIGITS}(?:\.\d+)?|\.\d+) (?P<exponent>[eE][-+]?\d{{1,3}}(?!\d))?
    (?:\s?/\s?(?P<divisor>\d+(?:\.\d+)?)(?![\d/]))?
    """,
    re.VERBOSE,
)
_MAX_DIGITS = 400  # nobody's answer is longer, and arithmetic on such numbers takes quadratic time


@runtime_checkable
class _HasToList(Protocol):
    """numpy and torch values, without importing either."""

    def tolist(self) -> Any: ...


def exact_match(response: str, ground_truth: Any) -> float:
    """1 if the response is the ground truth, without the white space around; a number counts as its text.

    A list of ground truths means that each of them is right.
    """
    return float(response.strip() in accepted_answers(ground_truth))


def last_number(response: str, ground_truth: Any) -> float:
    """1 if the number in the response equals the one of the ground truth.

    It is the first number after the last `####` (GSM8K's mark of the answer), or else the last number of all.
    Currency signs, thousands separators and a full stop at the end do not matter; a fraction a/b is one number.
    A list of ground truths means that each of them is right.
    """
    truths = [find_number(answer) for answer in accepted_answers(ground_truth)]
    wanted = [truth for truth in truths if truth is not None]
    if not wanted:
        raise RewardError(f"ground_truth {ground_truth!r} has no number", remedy="use exact_match, or mend the data")
    return float(find_number(response) in wanted)


def find_number(text: str) -> Fraction | None:
    """The number that `text` gives as its answer, or None."""
    _, mark, answer = text.rpartition("####")
    marked = _NUMBER.search(answer) if mark else None
    if marked is not None:
        return _value(marked)
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _value(last)


def accepted_answers(ground_truth: Any) -> list[str]:
    """The answers that are right, as texts: of a number, a text, or lists and arrays of these at any depth.

    A dict gives those under its key `target`, as verl's search data sets have it.

    Raises:
        RewardError: There is no ground truth.
    """
    answers: list[str] = []
    left = [ground_truth]
    while left:
        value = left.pop(0)
        if isinstance(value, _HasToList):
            value = value.tolist()
        match value:
            case {"target": target}:
                left.insert(0, target)
            case list() | tuple() | set() | frozenset():
                left[:0] = value
            case float() if value.is_integer():  # tables turn integers with gaps into floats
                answers += [str(int(value)), str(value)]
            case None:
                pass
            case _:
                answers.append(str(value).strip())
    if not answers:
        raise RewardError(
            f"ground_truth is {ground_truth!r}, so nothing can be right",
            remedy="set data.truth_key to the column that holds it",
        )
    return answers


def _value(match: re.Match[str]) -> Fraction | None:
    body = match["body"].replace(",", "")
    divisor = match["divisor"] or "1"
    if len(body) > _MAX_DIGITS or len(divisor) > _MAX_DIGITS or Decimal(divisor) == 0:
        return None
    negative = any(sign and sign in "-\u2212" for sign in (match["sign"], match["inner_sign"]))
    value = Fraction(body + (match["exponent"] or "")) / Fraction(divisor)
    return -value if negative else value
