"""Values as people write them: in YAML, in messages, in the reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from tandem.config.document import scalar_kind


def show(value: Any) -> str:
    """A value on one line, as it would stand in YAML or on the command line; texts in quotes only where needed."""
    if isinstance(value, BaseModel):
        return show(value.model_dump())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str) and _is_plain(value):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def quote(value: Any) -> str:
    """Like `show`, but a text is always in quotes, so that a message shows where it begins and ends."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else show(value)


def _float(value: float) -> str:
    mantissa, _, exponent = repr(value).partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def _is_plain(text: str) -> bool:
    """True where YAML reads the text back as itself without quotes, also inside of {} and []."""
    special = any(character in text for character in ",[]{}\n\t") or ": " in text or " #" in text or text.endswith(":")
    return (
        bool(text)
        and text == text.strip()
        and not special
        and text[0] not in "-?:#&*!|>%@`\"'"
        and scalar_kind(text) == "str"
    )
