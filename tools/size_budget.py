"""Checks that files and functions stay small, and prints how large the rooms are."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Aims, in lines of code (neither blank, nor comment, nor docstring): printed, not enforced.
PACKAGE_AIM = 9000
SPINE_AIM = 2500
SPINE = ("train.py", "collect.py", "batch.py", "algorithm/", "trainer/", "rollout/", "hybrid/", "model/")
PACKAGE = Path(__file__).resolve().parent.parent / "tandem"


def main() -> bool:
    """Print totals and what is too large; True if anything is."""
    totals: Counter[str] = Counter()
    too_large: list[str] = []
    spine = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = len(source.splitlines())
        name = path.relative_to(PACKAGE.parent)
        tree = ast.parse(source)
        totals[str(name.parent)] += code_lines(source, tree)
        if str(path.relative_to(PACKAGE)).startswith(SPINE):
            spine += code_lines(source, tree)
        if lines > MAX_FILE_LINES:
            too_large.append(f"{name}: {lines} lines (at most {MAX_FILE_LINES})")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_large.append(f"{name}:{node.lineno}: {node.name} has {length} (at most {MAX_FUNCTION_LINES})")
    for room, lines in sorted(totals.items()):
        print(f"{lines:6d}  {room}")
    print(f"{sum(totals.values()):6d}  lines of code in all, aim {PACKAGE_AIM}")
    print(f"{spine:6d}  of these in the spine, aim {SPINE_AIM}")
    for line in too_large:
        print(f"too large: {line}")
    return bool(too_large)


def code_lines(source: str, tree: ast.Module) -> int:
    """Lines that are neither blank, nor comments, nor docstrings."""
    documented: set[int] = set()
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text and node.end_lineno is not None:
            documented.update(range(node.lineno, node.end_lineno + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in enumerate(source.splitlines(), 1)
    )


if __name__ == "__main__":
    sys.exit(main())
