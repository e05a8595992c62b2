"""Texts that a tokenizer cannot encode: word-level tokenizers have no token for what is not in their list."""

from __future__ import annotations

import re

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tandem.errors import DataError

_LISTED = 10  # unknown pieces named in an error
_SURROGATE = re.compile("[\ud800-\udfff]")


class Vocabulary:
    """Knows which texts can be encoded.

    Most tokenizers encode any text but half of a surrogate pair, which JSON may hold. One of word level, such as the
    character tokenizer, does not, unless it has an unknown token; tokenizers then raises a plain `Exception` in the
    middle of a batch. So it is asked beforehand.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._known: frozenset[str] | None = None  # None = any text
        self._backend: Tokenizer | None = None
        self._added: re.Pattern[str] | None = None
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            return
        self._backend = tokenizer.backend_tokenizer
        if isinstance(self._backend.model, models.WordLevel):
            known = frozenset(self._backend.get_vocab(with_added_tokens=False))
            self._known = known if self._backend.model.unk_token not in known else None
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added))) if added else None

    def check(self, text: str, place: str) -> None:
        """Raise DataError where `text` has pieces without a token; `place` says where it stands."""
        if _SURROGATE.search(text):
            raise DataError(
                f"{place}: half of a surrogate pair is no character: {text!a:.60}",
                remedy="mend what wrote the file: it cut a text in the middle of a character",
            )
        if self._known is None:
            return
        parts = self._added.split(text) if self._added is not None else [text]
        unknown = sorted({piece for part in parts for piece in self._pieces(part)} - self._known)
        if unknown:
            listed = ", ".join(repr(piece) for piece in unknown[:_LISTED])
            more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
            raise DataError(
                f"{place}: the tokenizer has no token for {listed}{more}",
                remedy="add them to model.tokenizer.characters, or take them out of the data",
            )

    def _pieces(self, text: str) -> list[str]:
        if not text or self._backend is None:
            return []
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        if self._backend.pre_tokenizer is None:
            return [text]
        return [piece for piece, _ in self._backend.pre_tokenizer.pre_tokenize_str(text)]
