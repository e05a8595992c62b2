from __future__ import annotations

from pathlib import Path

from tandem.observe.metrics import METRICS, formatted, render_markdown, reported_name

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_in_docs_is_made_from_the_table() -> None:
    assert PAGE.read_text() == render_markdown(), "python -m tandem.observe.metrics > docs/metrics.md"


def test_every_metric_has_a_unit_a_meaning_and_a_format_that_works() -> None:
    for name, metric in METRICS.items():
        assert metric.unit, name
        assert metric.meaning.endswith("."), name
        assert formatted(name, 1234.5), name


def test_verl_names_are_unique_and_their_absence_keeps_ours() -> None:
    reported = [reported_name(name, "verl") for name in METRICS]
    assert len(set(reported)) == len(METRICS)
    assert reported_name("policy/loss", "verl") == "actor/pg_loss"
    assert reported_name("reward/mean", "verl") == "critic/rewards/mean"
    assert reported_name("policy/ratio_max", "verl") == "policy/ratio_max"
    assert reported_name("reward/my_key", "verl") == "reward/my_key"
    assert reported_name("policy/loss", "tandem") == "policy/loss"
