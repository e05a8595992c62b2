"""Settings that do not fit together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Conflict:
    """Settings that do not fit together. The first key is the one that the message is about; the others take part."""

    keys: tuple[str, ...]
    message: str
    remedy: str
