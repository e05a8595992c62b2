"""Section `sft`: a supervised warm start before the first step."""

from __future__ import annotations

from pydantic import Field

from tandem.config.section import Count, CountOrZero, Positive, Section, Text


class SftConfig(Section):
    """A supervised warm start before the first step."""

    train: Text | None = Field(
        None,
        description="Prompts with answers: parquet or jsonl file, hub name or generator (file.py:name). null = none.",
    )
    steps: CountOrZero = Field(0, description="Optimizer updates of the warm start.")
    batch_size: Count = Field(64, description="Rows per update of the warm start.")
    lr: Positive = Field(
        1e-5, description="Learning rate of the warm start; it falls to 0 over the last fifth of the steps."
    )
