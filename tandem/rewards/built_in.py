"""The reward functions that Tandem brings along."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from tandem.rewards.format import check_pattern, format_regex
from tandem.rewards.maths import maths
from tandem.rewards.numbers import exact_match, last_number

BUILT_IN: Mapping[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "maths": maths,
    "format_regex": format_regex,
}


def prepare_built_in(name: str, options: Mapping[str, Any]) -> None:
    """Do what the function `name` needs before its first call: check its options, import its library.

    Raises:
        RewardError: An option is wrong.
    """
    if name == "format_regex" and "pattern" in options:
        check_pattern(options["pattern"])
    if name == "maths":
        import_module("math_verify")  # a third of a second that shall not count as the first call's time
