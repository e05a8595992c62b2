"""Section `tracking`: where metrics and rollouts are written, beside the run's folder."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.config.section import Count, CountOrZero, Section, Text

Trackers = Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], Field(strict=False)]


class TrackingConfig(Section):
    """Where metrics and rollouts are written, beside the run's folder."""

    to: Trackers = Field((), description="Trackers that get the metrics as well.")
    project: Text = Field("tandem", description="Project under which wandb and trackio list the run.")
    names: Literal["tandem", "verl"] = Field("tandem", description="Names of the metrics in the trackers.")
    rollouts_every: CountOrZero = Field(1, description="Steps between written rollouts. 0 = never.")
    rollouts_max: Count = Field(64, description="Most responses written per step.")
