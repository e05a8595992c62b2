"""What every rollout engine can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from tandem.batch import Prompt, Response
from tandem.errors import DataError, PhaseError
from tandem.rollout.options import SamplingOptions


@runtime_checkable
class Engine(Protocol):
    """Answers prompts with the policy's weights. One contract for all: tests/contract/test_engines.py."""

    policy_version: int  # of the weights

    def wake(self, policy_version: int) -> None:
        """Get ready to answer with the weights as they are now, which are those of `policy_version`."""
        ...

    def sleep(self) -> None:
        """Free the KV cache, as far as the device lets go of it. No response can be asked for until `wake`."""
        ...

    def check(self, prompts: Sequence[Prompt], options: SamplingOptions) -> None:
        """What `stream` finds wrong before it begins.

        Raises:
            PhaseError: The engine is asleep.
            DataError: A prompt without tokens.
            ModelError: Prompt and response are longer than what the engine or the model is made for.
        """
        ...

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        """Yield each response as soon as it ends.

        Raises:
            PhaseError, DataError, ModelError: See `check`; ModelError also where log-probs are not finite.
        """
        ...


def checked_length(prompts: Sequence[Prompt], options: SamplingOptions, *, awake: bool) -> int:
    """Tokens that the longest prompt and its response may take together, in a batch that an engine can answer.

    Raises:
        PhaseError: The engine is asleep.
        DataError: A prompt without tokens.
    """
    if not awake:
        raise PhaseError("the engine is asleep", remedy="ask for responses within a rollout phase")
    empty = [row for row, prompt in enumerate(prompts) if not prompt.tokens]
    if empty:
        raise DataError(f"prompts without a single token, in rows {empty[:10]} of the batch")
    return max((len(prompt.tokens) for prompt in prompts), default=0) + options.max_response_length
