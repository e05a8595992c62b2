"""Section `data`: the prompts, where they come from and how they become tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.config.section import Count, Positive, Section, Text


class DataSource(Section):
    """One of several data files, and how often it is drawn from."""

    path: Text = Field(..., description="File, hub name or generator (file.py:name).")
    weight: Positive = Field(1.0, description="Share of the prompts drawn from here, relative to the other sources.")


DataSources = Annotated[tuple[DataSource, ...], Field(strict=False, min_length=1)]


class DataConfig(Section):
    """The prompts, where they come from and how they become tokens."""

    train: Text | DataSources | None = Field(
        None,
        description=(
            "Prompts to train on: parquet or jsonl file, hub name, generator (file.py:name), or a list of "
            "{path: ..., weight: ...} to mix several."
        ),
    )
    epochs: Count = Field(1, description="Passes over the prompts; run.steps, where given, decides instead.")
    prompts_per_step: Count = Field(64, description="Prompts drawn per step; each is answered rollout.n times.")
    prompt_key: Text = Field(
        "prompt", description="Column of the prompt: a text is tokenised raw, a list of messages by the chat template."
    )
    truth_key: Text = Field(
        "auto",
        description=(
            "Column of the ground truth; dots lead into nested columns. auto = the first that exists of "
            "reward_model.ground_truth, reward_model/ground_truth, ground_truth, answer; none = there is none."
        ),
    )
    source_key: Text = Field(
        "data_source", description="Column that names a row's source: picks the reward function and splits the metrics."
    )
    chat_template: Text = Field(
        "auto",
        description=(
            "auto = the template for messages, raw for texts; always = a text becomes the user's message; "
            "never = messages are refused; or the path of a template (.jinja), used for texts, too."
        ),
    )
    chat_template_options: dict[str, Any] = Field(
        default_factory=dict, description="Handed to the chat template, such as {enable_thinking: false}."
    )
    system_prompt: str | None = Field(None, description="System message put before the messages of every prompt.")
    max_prompt_length: Count = Field(1024, description="Longest prompt, in tokens, template included.")
    over_length: Literal["filter", "error", "left", "right", "middle"] = Field(
        "filter",
        description=(
            "Prompts over max_prompt_length: filter leaves them out, error stops, left, right and middle cut tokens "
            "off there."
        ),
    )
    shuffle: bool = Field(True, description="Draw the prompts in a new random order in each epoch.")
    max_rows: Count | None = Field(None, description="Use only the first so many rows of each source. null = all.")
