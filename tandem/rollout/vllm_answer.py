"""A response that vLLM is writing."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

from tandem.batch import Response
from tandem.errors import ModelError
from tandem.rollout.stop import Decode, StopStrings


class Answer:
    """Collects what vLLM hands out of one request: all at its end, or token by token.

    Attributes:
        finished: vLLM goes on with it no further.
        prompt_logprobs: Of the prompt's tokens but the first, where they were asked for.
    """

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.finished = False
        self.prompt_logprobs: tuple[float, ...] = ()
        self._prompt = prompt
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._is_new = False

    def take(self, output: Any) -> None:
        """Append what came since the last time, in a RequestOutput of vLLM."""
        [written] = output.outputs
        tokens = [int(token) for token in written.token_ids]
        self._tokens += tokens
        if written.logprobs is not None:
            self._logprobs += [at[token].logprob for token, at in zip(tokens, written.logprobs, strict=True)]
        if output.prompt_logprobs:
            of_tokens = zip(self._prompt[1:], output.prompt_logprobs[1:], strict=True)
            self.prompt_logprobs = tuple(at[token].logprob for token, at in of_tokens)
        self.finished = output.finished
        self._is_new = True

    def is_stopped(self, stop: StopStrings) -> bool:
        """Whether its newest tokens complete a stop string: seen at the end of the text, confirmed in the whole."""
        if not self._is_new:
            return False
        self._is_new = False
        return all(stop.found([self._tokens[-stop.window :]])) and all(stop.found([self._tokens]))

    def as_response(
        self, group: int, index: int, prompt_id: int, decode: Decode, stop: StopStrings, eos_ids: Set[int]
    ) -> Response:
        """What it has become.

        Raises:
            ModelError: Some log-prob is not finite.
        """
        tokens, logprobs = tuple(self._tokens), tuple(self._logprobs)
        if not all(map(math.isfinite, logprobs)):
            raise ModelError(
                f"the model's logits are not finite (response {index} to prompt {prompt_id})",
                remedy="the weights have diverged: lower trainer.lr, or start from an earlier checkpoint",
            )
        has_eos = tokens[-1] in eos_ids
        [text] = decode([tokens[:-1] if has_eos else tokens])
        text, stopped = stop.cut(text)
        return Response(group, index, tokens, logprobs, text, "stop" if stopped or has_eos else "length")
