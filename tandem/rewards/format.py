"""Built-in reward for the form of a response."""

from __future__ import annotations

import re

from tandem.errors import RewardError


def format_regex(response: str, *, pattern: str) -> float:
    """1 if `pattern`, a regular expression, occurs in the response; `.` also matches a line end.

    Write ^ and \\Z around the pattern if it shall match the whole response.
    """
    return float(re.search(pattern, response, re.DOTALL) is not None)


def check_pattern(pattern: object) -> None:
    """Refuse a pattern that is no regular expression, before anything is scored.

    Raises:
        RewardError: `pattern` is not a text or not a regular expression.
    """
    if not isinstance(pattern, str):
        raise RewardError(
            f"reward.options: pattern is {pattern!r}, not a regular expression",
            remedy='give a text, such as pattern: "<answer>.*</answer>"',
        )
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(
            f"reward.options: pattern {pattern!r} is not a regular expression: {error}",
            remedy=r"a backslash before ( ) [ ] { } . * + ? | ^ $ makes each a plain character",
        ) from error
