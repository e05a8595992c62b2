"""From a prompt, text or messages, to the text that the policy reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from tandem.config.data import DataConfig
from tandem.errors import DataError

_OURS = ("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize")
# A template is code: beside jinja2's errors come those of Python's operators and methods.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class PromptText:
    """The text of a prompt. `templated`: it already holds its special tokens, so that the tokenizer adds none."""

    text: str
    templated: bool


class ChatTemplate:
    """Writes prompts as text: messages by the tokenizer's chat template, texts as they are.

    `data.chat_template` decides: `auto` as above; `always` makes a text the user's message; `never` refuses messages;
    the path of a template (.jinja) is used in place of the tokenizer's own, for texts, too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        """
        Raises:
            DataError: The template file cannot be read, the tokenizer has no template though one is asked for, or an
                option has no effect.
        """
        self.was_passed_over = False  # a text was written as it stands, although there is a template
        self._tokenizer = tokenizer
        self._mode = config.chat_template
        self._options = dict(config.chat_template_options)
        self._system_prompt = config.system_prompt
        self._template = _template_of(tokenizer, config.chat_template)
        if self._template is None and self._mode == "always":
            raise self._no_template("data.chat_template=always")
        if self._template is not None:
            _check_options(self._options, self._template)

    def write(self, prompt: object, place: str) -> PromptText:
        """Write one prompt, a text or messages, with the prompt for the assistant's turn at its end.

        Raises:
            DataError: It is neither, or the template cannot write it; names `place`.
        """
        if isinstance(prompt, str):
            if self._mode in ("auto", "never"):
                return self._raw(prompt, place)
            messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, (Sequence, np.ndarray)):  # an array is what pandas makes of a list in parquet
            messages = [_message(message, place) for message in prompt]
        else:
            raise DataError(
                f"{place}: a prompt is a text or a list of messages, this is of type {type(prompt).__name__}",
                remedy="set data.prompt_key to the column of the prompts",
            )
        return PromptText(self._render(messages, place), templated=True)

    def _raw(self, text: str, place: str) -> PromptText:
        keys = {"system_prompt": self._system_prompt is not None, "chat_template_options": bool(self._options)}
        for key, given in keys.items():
            if given:
                raise DataError(
                    f"{place}: data.{key} has no effect on a text that is tokenised raw",
                    remedy=f"set data.chat_template=always, or remove data.{key}",
                )
        self.was_passed_over |= self._template is not None
        return PromptText(text, templated=False)

    def _render(self, messages: list[dict[str, Any]], place: str) -> str:
        if self._mode == "never":
            raise DataError(
                f"{place}: the prompt is a list of messages, and data.chat_template=never",
                remedy="set data.chat_template=auto, or write the prompts as texts",
            )
        if self._template is None:
            raise self._no_template(place)
        if not messages:
            raise DataError(f"{place}: the list of messages is empty")
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
                **self._options,  # variables that the template itself defines
            )
        except _TEMPLATE_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise DataError(f"{place}: the chat template refuses these messages: {reason}") from error
        assert isinstance(text, str)
        return text

    def _no_template(self, place: str) -> DataError:
        return DataError(
            f"{place}: messages need a chat template, and the tokenizer of {self._tokenizer.name_or_path!r} has none",
            remedy="set data.chat_template=path.jinja, use a chat model, or write the prompts as texts",
        )


def _template_of(tokenizer: PreTrainedTokenizerBase, mode: str) -> str | None:
    if mode == "never":
        return None
    if mode in ("auto", "always"):
        own = tokenizer.chat_template
        if isinstance(own, dict):  # some tokenizers carry several, by name
            own = own.get("default")
        return own or None
    try:
        return Path(mode).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template={mode}: cannot be read: {error}",
            remedy="give auto, always, never, or the path of a template (.jinja)",
        ) from error


def _check_options(options: Mapping[str, Any], template: str) -> None:
    """A misspelt option would be ignored in silence: Jinja lets undefined names pass."""
    for name in options:
        if name in _OURS:
            raise DataError(f"data.chat_template_options.{name}: Tandem sets this one itself", remedy="remove it")
        if name not in template:
            raise DataError(
                f"data.chat_template_options.{name}: the chat template never reads it",
                remedy="this model's template has no such option: leave it out, or data.chat_template_options={}",
            )


def _message(message: object, place: str) -> dict[str, Any]:
    """Check one message, join its text parts, and drop null fields: parquet adds them where only some rows have one."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"{place}: a message is a mapping with role and content, this is {message!r:.80}")
    fields = {str(key): value for key, value in message.items() if value is not None}
    content = fields.get("content", "")
    if isinstance(content, (Sequence, np.ndarray)) and not isinstance(content, str):
        content = _joined_parts(content, place)
    if not isinstance(content, str):
        raise DataError(f"{place}: the content of a message is a text, this one is of type {type(content).__name__}")
    return {**fields, "content": content}


def _joined_parts(parts: Iterable[object], place: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
        if not isinstance(text, str):
            raise DataError(
                f"{place}: a message holds a part of type {kind!r}; Tandem trains on text only",
                remedy="use prompts without images, video and sound",
            )
        texts.append(text)
    return "".join(texts)
