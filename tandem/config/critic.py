"""Section `critic`: the value model of PPO, which there is with `algorithm.advantage=gae`."""

from __future__ import annotations

from pydantic import Field

from tandem.config.section import CountOrZero, Positive, Section, Text


class CriticConfig(Section):
    """The value model of PPO, which there is with `algorithm.advantage=gae`."""

    path: Text | None = Field(
        None,
        description="Model folder or hub name. A run's folder means its policy; checkpoints/step_N/critic in it is its "
        "critic. null = the policy as it is before the first step, with a new head.",
    )
    lr: Positive = Field(1e-5, description="Learning rate, constant.")
    warmup_steps: CountOrZero = Field(0, description="Steps at the start in which only the critic learns.")
    clip_value: Positive | None = Field(
        0.5,
        description="How far a value may move in the updates of one step before it is clipped, in the reward's unit. "
        "null = no limit.",
    )
