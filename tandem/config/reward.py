"""Section `reward`: what scores the responses, and in which bounds it runs."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from tandem.config.section import Count, CountOrZero, NamedTexts, Positive, Section, Share, SomeTexts, Text


class RewardConfig(Section):
    """What scores the responses, and in which bounds it runs."""

    function: Text | NamedTexts | SomeTexts | None = Field(
        None,
        description=(
            "file.py:name, file.py:Class (made once per worker) or the name of a built-in function; "
            "{data_source: function} for a function per source; "
            "a list for the weighted sum of several."
        ),
    )
    weights: dict[Text, float] = Field(
        default_factory=dict,
        description="Weight of each function of a list, by its name: {exact_match: 1.0, format: 0.2}. Without one: 1.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments handed to the function.")
    batched: bool = Field(False, description="The function takes lists of responses and returns a list.")
    workers: Count = Field(
        2, description="Worker processes that run reward functions; each can be killed and replaced."
    )
    concurrency: Count = Field(32, description="Calls of an async function in flight at once, over all workers.")
    timeout_s: Positive = Field(
        10.0, description="Seconds that one call may take, from its own start; then the response has no reward."
    )
    memory_gib: Positive = Field(4.0, description="Most memory of one worker process, in GiB.")
    max_invalid_share: Share = Field(
        0.5,
        description=(
            "Stop with an error when more than this share of the responses has no reward in each of 3 steps in a row. "
            "One bad step never stops a run."
        ),
    )
    overlong_buffer: CountOrZero = Field(
        0,
        description="The last so many tokens before max_response_length cost reward, more with each token (DAPO's soft "
        "punishment of long responses). 0 = off.",
    )
    overlong_penalty: float = Field(
        1.0,
        gt=0,
        le=1_000_000,
        description="What a response that fills the whole overlong_buffer loses, in the reward's own unit.",
    )
