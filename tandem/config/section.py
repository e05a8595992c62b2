"""What all sections of the config share: a closed, frozen schema and the numbers that occur in it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Auto = Literal["auto"]

# YAML has lists only; a tuple accepts one although types are strict.
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
SomeTexts = Annotated[tuple[Text, ...], Field(strict=False, min_length=1)]
NamedTexts = Annotated[dict[Text, Text], Field(min_length=1)]


class Section(BaseModel):
    """One section of the config. Types are strict: the text "8" is no number, 1 is no bool; an integer may stand
    for a float. Infinite and NaN values are refused everywhere."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,  # the validators are built when they are first used: `import tandem.config` stays fast
    )
