"""From rows to the tokens of their prompts, within the length limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from tandem.config.data import DataConfig
from tandem.data.columns import prompt_of
from tandem.data.files import Row
from tandem.data.length import cut_to
from tandem.data.problems import Problems
from tandem.data.template import ChatTemplate, PromptText
from tandem.data.vocabulary import Vocabulary
from tandem.errors import DataError


@dataclass(frozen=True)
class EncodedPrompt:
    """The prompt of one row. `tokens` is what the policy reads, `text` the same as text."""

    row: Row
    text: str
    tokens: Sequence[int]


class PromptEncoder:
    """Turns the prompt column of rows into tokens, as section `data` of the config says.

    A text is encoded with the special tokens that the tokenizer adds by itself; what a chat template wrote is encoded
    without, as the template writes its own. Either way a prompt starts with at most one BOS token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        """
        Raises:
            DataError: The chat template or its options do not fit.
        """
        self._tokenizer = tokenizer
        self._config = config
        self._template = ChatTemplate(tokenizer, config)
        self._vocabulary = Vocabulary(tokenizer)

    @property
    def passed_template_over(self) -> bool:
        """A text was encoded as it stands, although there is a chat template and nobody said never."""
        return self._template.was_passed_over

    def encode(self, rows: Iterable[Row], problems: Problems) -> list[EncodedPrompt | None]:
        """Encode the prompts of `rows`, in order. None where `over_length=filter` leaves one out.

        A row with a fault is added to `problems` and has no entry here.
        """
        written: list[tuple[Row, PromptText]] = []
        for row in rows:
            try:
                prompt = prompt_of(row, self._config.prompt_key)
                text = self._template.write(prompt, row.place)
                self._vocabulary.check(text.text, row.place)
                written.append((row, text))
            except DataError as error:
                problems.add(error)
        encoded: list[EncodedPrompt | None] = []
        for (row, prompt_text), tokens in zip(written, self._tokens([text for _, text in written]), strict=True):
            try:
                encoded.append(self._within_limit(row, prompt_text.text, tokens))
            except DataError as error:
                problems.add(error)
        return encoded

    def _tokens(self, texts: Sequence[PromptText]) -> list[list[int]]:
        """Two calls for all texts: fast tokenizers spread a batch over the cores."""
        tokens: list[list[int]] = [[] for _ in texts]
        for templated in (False, True):
            places = [place for place, text in enumerate(texts) if text.templated is templated]
            batch = encode_batch(self._tokenizer, [texts[place].text for place in places], special_tokens=not templated)
            for place, ids in zip(places, batch, strict=True):
                tokens[place] = self._with_one_bos(ids)
        return tokens

    def _with_one_bos(self, tokens: list[int]) -> list[int]:
        """A text that was written by a chat template beforehand starts with BOS, and the tokenizer adds another."""
        bos = self._tokenizer.bos_token_id
        doubled = bos is not None and tokens[:2] == [bos, bos]
        return tokens[1:] if doubled else tokens

    def _within_limit(self, row: Row, text: str, tokens: Sequence[int]) -> EncodedPrompt | None:
        limit, rule = self._config.max_prompt_length, self._config.over_length
        if not tokens:
            raise DataError(f"{row.place}: the prompt is empty", remedy="remove the row, or give it a text")
        if len(tokens) <= limit:
            return EncodedPrompt(row, text, tokens)
        if rule == "filter":
            return None
        if rule == "error":
            raise DataError(
                f"{row.place}: the prompt has {len(tokens)} tokens, more than data.max_prompt_length={limit}",
                remedy="raise data.max_prompt_length, or choose data.over_length=filter, left, right or middle",
            )
        kept = cut_to(tokens, limit, rule)
        return EncodedPrompt(row, decode(self._tokenizer, kept), kept)


def encode_batch(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
    """Token ids of each text, of any length, with or without the special tokens that the tokenizer adds by itself."""
    if not texts:  # tokenizers refuse an empty batch
        return []
    batch = tokenizer(
        list(texts),
        add_special_tokens=special_tokens,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # the limit is ours to check
    )
    return [list(ids) for ids in batch["input_ids"]]


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of `tokens`, special tokens included, spaces as they are."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
