"""What a reward function returned, read as a number and metrics."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from tandem.rewards.sample import Score

# Names that stand for the rewards as a whole; what a function calls so is written with the function's name.
RESERVED = frozenset({"mean", "mean_kept", "std", "invalid"})


@runtime_checkable
class _Array(Protocol):
    """numpy and torch values alike, without importing either."""

    @property
    def shape(self) -> Sequence[int]: ...

    def item(self) -> Any: ...


def invalid(error: str) -> Score:
    """The score of a response without a reward."""
    return Score(None, error=error)


def timed_out(timeout_s: float) -> Score:
    """The score of a call that took too long."""
    return invalid(f"no answer within reward.timeout_s={timeout_s:g}")


def as_number(value: object) -> float | None:
    """`value` as a float where it is one number: int, float, bool, numpy scalar, 0-d array or tensor. Else None."""
    if isinstance(value, _Array) and not isinstance(value, Real):
        value = value.item() if tuple(value.shape) == () else None
    if not isinstance(value, Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of floats
        return math.inf


def read_one(name: str, returned: object) -> Score:
    """Read what the function returned for one response: a number, or a dict with `score` and further numbers.

    A further number that is not finite is left out, as if this response did not have it; what is no number is ignored.
    """
    if inspect.iscoroutine(returned):
        returned.close()
        return invalid(f"reward function {name} returned a coroutine: define it with `async def`")
    metrics: dict[str, float] = {}
    score = returned
    if isinstance(returned, Mapping):
        if "score" not in returned:
            keys = ", ".join(map(str, returned)) or "none"
            return invalid(f"reward function {name} returned a dict without the key 'score' (keys: {keys})")
        score = returned["score"]
        for key, extra in returned.items():
            number = as_number(extra)
            if key != "score" and number is not None and math.isfinite(number):
                metrics[f"{name}/{key}" if key in RESERVED else str(key)] = number
    value = as_number(score)
    if value is None:
        return invalid(f"reward function {name} returned {_shown(score)}, which is not a number")
    if not math.isfinite(value):
        return invalid(f"reward function {name} returned {value}, which is not finite")
    return Score(value, metrics)


def read_many(name: str, returned: object, count: int) -> list[Score]:
    """Read what a batched function returned for `count` responses: one number or dict for each."""
    if inspect.iscoroutine(returned):
        return [read_one(name, returned)] * count
    rows = _rows(returned)
    if rows is None:
        wrong = invalid(f"reward function {name} returned {_shown(returned)} for a batch of {count}, not a list")
        return [wrong] * count
    if len(rows) != count:
        return [invalid(f"reward function {name} returned {len(rows)} values for a batch of {count}")] * count
    return [read_one(name, row) for row in rows]


def _rows(returned: object) -> list[object] | None:
    """The entries of a list, a tuple or the like, or a 1-d array or tensor."""
    if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        return None
    is_list = isinstance(returned, Sequence) or (isinstance(returned, _Array) and len(returned.shape) == 1)
    return list(returned) if is_list else None


def _shown(value: object) -> str:
    """A short name of a value; its text only for types of which that is harmless and short."""
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"the text {value[:60]!r}" + (" ..." if len(value) > 60 else "")
    if isinstance(value, Real):
        return f"the number {value}"
    kind = type(value).__name__
    return f"a {kind} of shape {tuple(value.shape)}" if isinstance(value, _Array) else f"a {kind}"
