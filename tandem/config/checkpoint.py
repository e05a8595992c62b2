"""Section `checkpoint`: when the run is saved and what is kept."""

from __future__ import annotations

from pydantic import Field

from tandem.config.section import Count, CountOrZero, Section


class CheckpointConfig(Section):
    """When the run is saved and what is kept."""

    every: CountOrZero = Field(20, description="Steps between checkpoints. 0 = only at the end.")
    keep: Count = Field(2, description="How many of the newest checkpoints are kept.")
    keep_best: CountOrZero = Field(1, description="How many of the best are kept beside them, by evaluation.metric.")
    background: bool = Field(True, description="Write checkpoints while training goes on.")
