"""The pages that people read, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ("config.md", "metrics.md")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of code."""

    page: str
    language: str
    text: str


def pages() -> list[Path]:
    """README and its like at the top, and everything in docs/."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def written_pages() -> list[Path]:
    """Those that are not made from the source."""
    return [page for page in pages() if page.name not in GENERATED]


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in these languages, in their order."""
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(page.name, language, text) for language, text in found if language in languages]
