"""All prompts of one source, tokenised and compact."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandem.batch import Prompt
from tandem.config.data import DataConfig
from tandem.data.columns import data_source_of, ground_truth_of
from tandem.data.encoder import EncodedPrompt, PromptEncoder
from tandem.data.files import Source, name_of, read_rows
from tandem.data.problems import Problems
from tandem.errors import DataError

S = TypeVar("S")
T = TypeVar("T")
_SHOWN_ALIKE = (bytes, Decimal, date, time, timedelta)  # beside JSON's types, what parquet has; a datetime is a date
CHUNK_ROWS = 1024  # rows tokenised in one call


@dataclass(frozen=True, slots=True)
class _Fields:
    text: str
    ground_truth: Any
    data_source: str
    extra_info: Any


class PromptTable:
    """The prompts of one source. Tokens lie in one array: a list of Python numbers would take nine times its memory."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self.has_raw_despite_template = False  # texts as they stand, although there is a chat template
        self.truth_digest = 0  # checksum of what responses are judged against, and by which function
        self._tokens = array("i")
        self._ends = [0]
        self._fields: list[_Fields] = []

    def __len__(self) -> int:
        return len(self._fields)

    def append(self, encoded: EncodedPrompt, *, truth_key: str, source_key: str) -> None:
        """Add a prompt with the other columns of its row.

        Raises:
            DataError: A column is missing or of a wrong type.
        """
        fields = _Fields(
            text=encoded.text,
            ground_truth=ground_truth_of(encoded.row, truth_key),
            data_source=data_source_of(encoded.row, source_key),
            extra_info=encoded.row.values.get("extra_info"),
        )
        self._fields.append(fields)
        self.truth_digest = zlib.crc32(canonical([fields.ground_truth, fields.data_source]), self.truth_digest)
        self._tokens.extend(encoded.tokens)
        self._ends.append(len(self._tokens))

    def prompt(self, row: int, prompt_id: int) -> Prompt:
        """The prompt of `row`, as draw number `prompt_id`."""
        fields = self._fields[row]
        return Prompt(
            tokens=tuple(self._tokens[self._ends[row] : self._ends[row + 1]]),
            text=fields.text,
            ground_truth=fields.ground_truth,
            data_source=fields.data_source,
            extra_info=fields.extra_info,
            prompt_id=prompt_id,
        )

    @property
    def data_sources(self) -> set[str]:
        """Names that its rows give as their source."""
        return {fields.data_source for fields in self._fields}

    @property
    def digest(self) -> int:
        """A checksum of all tokens and their boundaries: other data, or another template, gives another one."""
        return zlib.crc32(array("q", self._ends).tobytes(), zlib.crc32(self._tokens.tobytes()))


def load_table(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    seed: int = 0,
    max_rows: int | None = None,
) -> PromptTable:
    """Read and tokenise the first `max_rows` rows of one source (`read_rows` says what a source can be).

    Raises:
        DataError: The source or some of its rows cannot be used, or every prompt is over the limit.
    """
    encoder = PromptEncoder(tokenizer, config)
    table = PromptTable()
    problems = Problems()
    rows = islice(read_rows(source, seed=seed), max_rows)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        for encoded in encoder.encode(chunk, problems):
            if encoded is None:
                table.num_dropped += 1
                continue
            try:
                table.append(encoded, truth_key=config.truth_key, source_key=config.source_key)
            except DataError as error:
                problems.add(error)
    problems.raise_if_any()
    table.has_raw_despite_template = encoder.passed_template_over
    if not len(table):
        raise nothing_left(name_of(source), table.num_dropped, config.max_prompt_length)
    return table


def canonical(value: object) -> bytes:
    """A text of `value` that is the same in every process. Of what has none, such as objects, it has the type only."""
    try:
        return json.dumps(value, sort_keys=True, default=_shown).encode()
    except (TypeError, ValueError, RecursionError):  # keys that do not compare, endless, too large a number
        return type(value).__name__.encode()


def _shown(value: object) -> object:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return repr(value) if isinstance(value, _SHOWN_ALIKE) else type(value).__name__


def nothing_left(source: str, num_dropped: int, limit: int) -> DataError:
    """The error for a source whose every prompt is over the limit."""
    return DataError(
        f"{source}: all {num_dropped} prompts have more tokens than data.max_prompt_length={limit}",
        remedy="raise data.max_prompt_length, or set data.over_length=left, right or middle",
    )


def load_each(sources: Iterable[S], load: Callable[[S], T]) -> list[T]:
    """Apply `load` to each source, so that the errors of all come at once."""
    problems = Problems()
    loaded: list[T] = []
    for source in sources:
        try:
            loaded.append(load(source))
        except DataError as error:
            problems.add(error)
    problems.raise_if_any()
    return loaded
