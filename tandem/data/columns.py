"""Columns: the prompt, the ground truth and the source of a row, in verl's schema or in flat columns."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from tandem.data.files import Row
from tandem.errors import DataError

TRUTH_KEYS = ("reward_model.ground_truth", "reward_model/ground_truth", "ground_truth", "answer")
DEFAULT_SOURCE_KEY = "data_source"
_MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
_MISSING = object()


def column(row: Row, key: str, option: str) -> Any:
    """The value at `key`; `a.b` is field b of the nested column a, unless a column has that very name.

    Raises:
        DataError: There is none; names the columns that exist and `option`, the setting that chose the key.
    """
    value = _find(row.values, key)
    if value is _MISSING:
        raise DataError(f"{row.place}: no column {key!r}; {_columns_of(row)}", remedy=f"set {option} to one of them")
    return value


def prompt_of(row: Row, key: str) -> Any:
    """What stands in the prompt column, text only.

    Raises:
        DataError: The column is missing, or the row comes with images, video or sound.
    """
    for name in _MEDIA_COLUMNS:
        media = row.values.get(name)
        if media is not None and not (isinstance(media, Sized) and len(media) == 0):
            raise DataError(
                f"{row.place}: column {name!r} is not empty; Tandem trains on text only",
                remedy="use a data set without images, video and sound",
            )
    return column(row, key, "data.prompt_key")


def ground_truth_of(row: Row, key: str) -> Any:
    """What a response is judged against, of whatever type, unchanged.

    Args:
        row: The row.
        key: The column; `auto` takes the first of `TRUTH_KEYS` that the row has (its value may be None); `none`
            says that there is no ground truth, for rewards that need none.

    Raises:
        DataError: There is no such column. To go on with None would turn a misnamed column into rewards of 0.
    """
    if key == "none":
        return None
    if key != "auto":
        return column(row, key, "data.truth_key")
    for candidate in TRUTH_KEYS:
        value = _find(row.values, candidate)
        if value is not _MISSING:
            return value
    raise DataError(
        f"{row.place}: no ground truth in any of {', '.join(TRUTH_KEYS)}; {_columns_of(row)}",
        remedy="set data.truth_key to its column, or to none where the reward needs no ground truth",
    )


def data_source_of(row: Row, key: str) -> str:
    """The name of the row's source. "" where the default column is missing or null: it is optional in flat data."""
    optional = key == DEFAULT_SOURCE_KEY
    value = row.values.get(key) if optional else column(row, key, "data.source_key")
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{row.place}: {key!r} is a name, but this one is of type {type(value).__name__}")
    return value


def _find(values: Mapping[str, Any], key: str) -> Any:
    if key in values:
        return values[key]
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _MISSING
        found = found[part]
    return found


def _columns_of(row: Row) -> str:
    return f"the columns are {', '.join(map(str, row.values)) or 'none at all'}"
