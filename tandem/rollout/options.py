"""How responses are to be sampled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are drawn. The same options, prompts and weights give the same responses.

    The log-prob kept for a token is that of the full distribution softmax(logits / temperature). Where `top_p` or
    `top_k` forbid some of its tokens, the embedded engine still keeps it, vLLM that of the distribution that is left
    (`Rollouts.cut_logprobs`); training then needs `old_logprobs=recompute` with either. At temperature 0 the most
    likely token is taken, and its log-prob is that of softmax(logits).

    Attributes:
        n: Responses to each prompt.
        max_response_length: Tokens of a response at most, EOS included.
        temperature: Logits are divided by it; 0 is greedy.
        top_p: Draw from the smallest set of most likely tokens that has at least this probability; 1 = all.
        top_k: Draw from the k most likely tokens (and those equal to the k-th); None = all.
        stop: A response ends where its text contains one of these, or with one that is a special token.
        seed: Of the sampling noise.
        step: Of training; it changes the noise, too.

    Raises:
        ValueError: Some values are out of range; names all of them.
    """

    n: int
    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        wrong = [
            message
            for is_wrong, message in (
                (self.n < 1, f"n is {self.n}, must be at least 1"),
                (
                    self.max_response_length < 1,
                    f"max_response_length is {self.max_response_length}, must be at least 1",
                ),
                (not 0.0 <= self.temperature < float("inf"), f"temperature is {self.temperature}, must be 0 or more"),
                (not 0.0 < self.top_p <= 1.0, f"top_p is {self.top_p}, must be above 0 and at most 1"),
                (self.top_k is not None and self.top_k < 1, f"top_k is {self.top_k}, must be at least 1 or None"),
                ("" in self.stop, "stop contains an empty string, which would end every response"),
            )
            if is_wrong
        ]
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def is_cut(self) -> bool:
        """Whether `top_p` or `top_k` leave tokens out."""
        return self.top_p < 1 or self.top_k is not None
