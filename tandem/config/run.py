"""Section `run`: where the run is kept, how long it is, what seeds it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tandem.config.section import Count, Section, Text

Seed = Annotated[int, Field(ge=0, lt=2**62)]


class RunConfig(Section):
    """Where the run is kept, how long it is, what seeds it."""

    folder: Text | None = Field(
        None,
        description="Folder of the run; a run that is already there goes on. null = runs/ and the YAML file's name.",
    )
    seed: Seed = Field(0, description="Seeds the order of the data, the sampling noise and new weights.")
    steps: Count | None = Field(
        None, description="Steps to train, of prompts_per_step prompts each. null = data.epochs."
    )
    allow_changes: bool = Field(
        False, description="Go on with an existing run although keys have changed that alter what it learns."
    )
