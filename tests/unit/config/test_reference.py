from __future__ import annotations

from pathlib import Path

from tandem.config import leaf_keys
from tandem.config.presets import PRESETS
from tandem.config.reference import render_markdown, render_text

DOCUMENT = Path(__file__).parents[3] / "docs" / "config.md"


def test_the_document_is_what_the_schema_says():
    remedy = "run: python -m tandem.config.reference > docs/config.md"
    assert DOCUMENT.read_text(encoding="utf-8") == render_markdown(), remedy


def test_every_option_and_preset_is_in_both_forms():
    text, markdown = render_text(), render_markdown()
    for key in leaf_keys():
        assert f"  {key} = " in text
        assert f"| `{key}` |" in markdown
    for preset in PRESETS:
        assert f"algorithm.preset={preset}" in text
        assert f"algorithm.preset={preset}" in markdown


def test_numbers_of_a_list_are_shown_with_the_range_of_each():
    text = render_text()
    assert "  algorithm.correction_range = [0.0, 2.0]    [list of 2 numbers, >= 0, <= 1; then >= 1]\n" in text
    assert "  trainer.betas = [0.9, 0.999]    [list of 2 numbers, each >= 0, < 1]\n" in text


def test_an_option_is_shown_with_default_type_range_and_meaning():
    assert (
        "  rollout.top_k = null    [integer | null, >= 1]\n"
        "      Sample only from so many likeliest tokens. null = from all tokens.\n"
    ) in render_text()
