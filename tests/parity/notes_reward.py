"""A reward in which random responses differ. The ground truth matters a little, so that it must arrive."""

from __future__ import annotations


def compute_score(solution_str: str, ground_truth: str) -> float:
    """As verl calls it: by keyword."""
    return sum(character.isdigit() for character in solution_str) / 10 + 0.05 * (ground_truth in solution_str)
