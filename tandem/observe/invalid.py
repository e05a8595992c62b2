"""When too many responses have no reward for too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEPS_IN_A_ROW = 3  # a judge that is down for a moment, or one strange batch, must not end a run


class InvalidRewards:
    """Counts the steps in a row in which more than `max_share` of the responses had no reward."""

    def __init__(self, max_share: float) -> None:
        self.max_share = max_share
        self._in_a_row = 0

    def observe(self, num_invalid: int, num_responses: int) -> bool:
        """Take note of a step; True where it is the one that should end the run. One that goes on counts anew."""
        self._in_a_row = self._in_a_row + 1 if num_invalid > self.max_share * num_responses else 0
        ends = self._in_a_row >= STEPS_IN_A_ROW
        self._in_a_row = 0 if ends else self._in_a_row
        return ends

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-able."""
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._in_a_row = state["in_a_row"]
