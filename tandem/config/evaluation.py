"""Section `evaluation`: held-out prompts."""

from __future__ import annotations

from pydantic import Field

from tandem.config.section import Count, CountOrZero, NamedTexts, NonNegative, Section, Text


class EvaluationConfig(Section):
    """Held-out prompts."""

    data: Text | NamedTexts | None = Field(
        None, description="Held-out prompts: a file or hub name, or {name: file} for several. null = none."
    )
    every: CountOrZero = Field(
        10, description="Steps between evaluations. 0 = only before the first and after the last."
    )
    n: Count = Field(
        1, description="Responses per held-out prompt; pass@k is estimated for k = 1, 2, 4, ... up to n, and n."
    )
    temperature: NonNegative | None = Field(
        None, description="Temperature of the evaluation; 0 = the likeliest token always. null = rollout.temperature."
    )
    metric: Text = Field(
        "pass@1", description="What keep_best and patience go by: pass@k, or name/pass@k of one of several sets."
    )
    patience: Count | None = Field(
        None, description="Stop after so many evaluations in a row without a new best. null = never."
    )

    @property
    def ks(self) -> tuple[int, ...]:
        """The k for which pass@k is estimated: powers of two up to n, and n."""
        return tuple(sorted({*(1 << power for power in range(self.n.bit_length())), self.n}))
