"""Prompts with their answers, as tokens, for supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tandem.config.data import DataConfig
from tandem.data.columns import prompt_of
from tandem.data.encoder import EncodedPrompt, PromptEncoder, encode_batch
from tandem.data.files import Row, read_rows
from tandem.data.problems import Problems
from tandem.data.table import CHUNK_ROWS, nothing_left
from tandem.data.vocabulary import Vocabulary
from tandem.errors import DataError, ModelError

RESPONSE_KEYS = ("response", "answer", "completion")


@dataclass(frozen=True)
class Example:
    """A prompt and the response to learn; `response_tokens` ends with EOS."""

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]


def load_examples(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, config: DataConfig | None = None, *, seed: int = 0
) -> tuple[Example, ...]:
    """All examples of one source, in their own order.

    The prompt is that of reinforcement learning: column, template and length limit of `config` (default:
    `DataConfig()`). The response is the first column of `RESPONSE_KEYS` that the row has, encoded by itself without
    further special tokens, then EOS. It is never cut.

    Raises:
        DataError: The source or some of its rows cannot be used.
        ModelError: The tokenizer has no EOS token.
    """
    config = config or DataConfig()
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no EOS token, so that a response could never end",
            remedy="set eos_token in its tokenizer_config.json",
        )
    encoder = PromptEncoder(tokenizer, config)
    vocabulary = Vocabulary(tokenizer)
    problems = Problems()
    examples: list[Example] = []
    num_dropped = 0
    rows = read_rows(str(path), seed=seed)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        encoded = encoder.encode(chunk, problems)
        prompts = [prompt for prompt in encoded if prompt is not None]
        num_dropped += len(encoded) - len(prompts)
        examples += _with_responses(prompts, tokenizer, vocabulary, problems)
    problems.raise_if_any()
    if not examples:
        raise nothing_left(str(path), num_dropped, config.max_prompt_length)
    return tuple(examples)


def check_examples(path: str | Path, config: DataConfig | None = None, *, seed: int = 0) -> None:
    """Look at the first row, before any model is loaded.

    Raises:
        DataError: The source is missing, unreadable, empty or of another format, or lacks a column.
    """
    row = next(read_rows(str(path), seed=seed))
    prompt_of(row, (config or DataConfig()).prompt_key)
    _response_of(row)


def _with_responses(
    prompts: Sequence[EncodedPrompt],
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
    problems: Problems,
) -> list[Example]:
    answered: list[tuple[EncodedPrompt, str]] = []
    for prompt in prompts:
        try:
            response = _response_of(prompt.row)
            vocabulary.check(response, prompt.row.place)
            answered.append((prompt, response))
        except DataError as error:
            problems.add(error)
    eos = tokenizer.eos_token_id
    encoded = encode_batch(tokenizer, [text for _, text in answered], special_tokens=False)
    return [
        Example(tuple(prompt.tokens), tuple(tokens if tokens[-1:] == [eos] else [*tokens, eos]))
        for (prompt, _), tokens in zip(answered, encoded, strict=True)
    ]


def _response_of(row: Row) -> str:
    for key in RESPONSE_KEYS:
        if key in row.values:
            response = row.values[key]
            if isinstance(response, str):
                return response
            if isinstance(response, int) and not isinstance(response, bool):  # the answer column of sums
                return str(response)
            raise DataError(f"{row.place}: {key!r} is a text, but this one is of type {type(response).__name__}")
    raise DataError(
        f"{row.place}: no response in any of {', '.join(RESPONSE_KEYS)}; the columns are {', '.join(row.values)}",
        remedy="name the column of the answers `response`",
    )
