"""The built-in reward for the form of a response."""

from __future__ import annotations

from tandem.rewards.format import format_regex


def test_a_pattern_occurs_or_not() -> None:
    pattern = r"^<think>.*</think>\s*<answer>[^<]+</answer>\Z"
    assert format_regex("<think>a\nb</think>\n<answer>4</answer>", pattern=pattern) == 1.0
    assert format_regex("<think>a</think><answer>4</answer> and more", pattern=pattern) == 0.0
    assert format_regex("4", pattern=pattern) == 0.0
    assert format_regex("well, 4", pattern=r"\d") == 1.0
