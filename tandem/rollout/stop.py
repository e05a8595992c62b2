"""Stop strings: found in the decoded text, wherever token borders fall."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from tandem.errors import ModelError

Decode = Callable[[Sequence[Sequence[int]]], list[str]]

_SLACK = 16  # tokens decoded besides those that can hold a stop string: special tokens, borders that decode differently


def split_stop(stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ids of those that are a special token each, which end a response like EOS; and the texts to search for.

    Responses are decoded without special tokens, so that no text has them.

    Raises:
        ModelError: Special tokens stand among other text.
    """
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = tuple(string for string in stop if string not in special)
    mixed = [(string, token) for string in texts for token in special if token in string]
    if mixed:
        listed = ", ".join(f"{string!r} holds {token}" for string, token in mixed)
        raise ModelError(
            f"rollout.stop: a special token of the tokenizer among other text can never be found: {listed}",
            remedy="give the token by itself, or a text without it",
        )
    return tuple(special[string] for string in stop if string in special), texts


class StopStrings:
    """Tells whether a text has a stop string, and cuts it there."""

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        # A token that is part of a stop string holds at least one of its bytes.
        self.window = max((len(string.encode()) for string in self._stop), default=0) + _SLACK

    def __bool__(self) -> bool:
        return bool(self._stop)

    def found(self, sequences: Sequence[Sequence[int]]) -> list[bool]:
        """Whether the text of each sequence of tokens has a stop string."""
        return [any(string in text for string in self._stop) for text in self._decode(sequences)]

    def cut(self, text: str) -> tuple[str, bool]:
        """`text` up to its first stop string, and whether it has one."""
        begins = [begin for string in self._stop if (begin := text.find(string)) >= 0]
        return (text[: min(begins)], True) if begins else (text, False)
