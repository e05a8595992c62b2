"""Prompts written as text: raw, or by the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tandem.config.data import DataConfig
from tandem.data.template import ChatTemplate, PromptText
from tandem.errors import DataError
from tests.tiny import tiny_tokenizer

QUESTION = [{"role": "user", "content": "1+1?"}]


def write(prompt: object, tokenizer: PreTrainedTokenizerFast | None = None, **options: Any) -> PromptText:
    return ChatTemplate(tokenizer or tiny_tokenizer(), DataConfig(**options)).write(prompt, "train.parquet, row 3")


def test_auto_leaves_texts_raw_and_writes_messages_by_the_template() -> None:
    assert write("1+1=") == PromptText("1+1=", templated=False)
    assert write(QUESTION) == PromptText("user: 1+1?\nassistant: ", templated=True)


def test_always_makes_a_text_the_users_message() -> None:
    assert write("1+1?", chat_template="always") == write(QUESTION)


def test_never_refuses_messages_and_leaves_texts_raw() -> None:
    assert write("1+1=", chat_template="never") == PromptText("1+1=", templated=False)
    with pytest.raises(DataError, match=r"row 3: the prompt is a list of messages, and data\.chat_template=never"):
        write(QUESTION, chat_template="never")


def test_a_template_file_is_used_for_messages_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<go>", encoding="utf-8")
    bare = tiny_tokenizer(chat_template=None)
    expected = PromptText("<user>1+1?<go>", templated=True)
    assert write(QUESTION, bare, chat_template=str(path)) == expected
    assert write("1+1?", bare, chat_template=str(path)) == expected
    with pytest.raises(DataError, match=r"absent\.jinja: cannot be read"):
        write(QUESTION, chat_template=str(tmp_path / "absent.jinja"))


def test_messages_without_a_chat_template_get_the_remedy() -> None:
    bare = tiny_tokenizer(chat_template=None)
    assert write("1+1=", bare).text == "1+1="
    for prompt, mode in ((QUESTION, "auto"), ("1+1?", "always")):
        with pytest.raises(DataError, match=r"has none\n  -> set data\.chat_template=path\.jinja"):
            write(prompt, bare, chat_template=mode)


def test_options_reach_the_template() -> None:
    assert write(QUESTION, chat_template_options={"enable_thinking": False}).text.endswith("assistant: (no thinking) ")
    assert write(QUESTION, chat_template_options={"enable_thinking": True}).text.endswith("assistant: ")


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(DataError, match="enable_thinkin: the chat template never reads it"):
        write(QUESTION, tiny_tokenizer(chat_template="{{ messages }}"), chat_template_options={"enable_thinkin": False})
    with pytest.raises(DataError, match="add_generation_prompt: Tandem sets this one itself"):
        write(QUESTION, chat_template_options={"add_generation_prompt": False})


def test_system_prompt_stands_first_unless_the_messages_have_one() -> None:
    assert write(QUESTION, system_prompt="Be brief.").text == "system: Be brief.\nuser: 1+1?\nassistant: "
    own = [{"role": "system", "content": "Think."}, *QUESTION]
    assert write(own, system_prompt="Be brief.").text.startswith("system: Think.\nuser:")
    assert write("1+1?", chat_template="always", system_prompt="Be brief.").text.startswith("system: Be brief.\nuser:")


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_settings_without_effect_on_a_raw_text_are_an_error(mode: str) -> None:
    with pytest.raises(DataError, match=r"data\.system_prompt has no effect on a text"):
        write("1+1=", chat_template=mode, system_prompt="Be brief.")
    with pytest.raises(DataError, match=r"data\.chat_template_options has no effect on a text"):
        write("1+1=", chat_template=mode, chat_template_options={"enable_thinking": False})


def test_of_several_templates_the_default_is_used() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "d{{ messages[0].content }}", "tool_use": "t"}
    assert write(QUESTION, tokenizer).text == "d1+1?"
    tokenizer.chat_template = {"tool_use": "t"}
    with pytest.raises(DataError, match="messages need a chat template"):
        write(QUESTION, tokenizer)


@pytest.mark.parametrize(
    "body", ["{{ 1 // 0 }}", "{{ messages[0].content.index('x') }}", "{{ {}.pop('x') }}", "{{ messages.pop(9) }}"]
)
def test_whatever_fails_in_a_template_is_named_with_the_row(body: str) -> None:
    with pytest.raises(DataError, match=r"row 3: the chat template refuses these messages: ."):
        write(QUESTION, tiny_tokenizer(chat_template=body))


def test_a_template_that_refuses_the_messages_is_named_with_the_row() -> None:
    strict = tiny_tokenizer(chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match="row 3: the chat template refuses these messages: no system role"):
        write(QUESTION, strict)


def test_text_parts_are_joined_and_null_fields_dropped() -> None:
    parts = [{"type": "text", "text": "1+", "image": None}, {"type": "text", "text": "1?", "image": None}]
    tokenizer = tiny_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{{ 'name' in m }}{% endfor %}")
    assert write([{"role": "user", "content": parts, "name": None}], tokenizer).text == "1+1?False"


def test_messages_in_an_array_are_read_like_a_list() -> None:
    assert write(np.array(QUESTION, dtype=object)) == write(QUESTION)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (4, "a prompt is a text or a list of messages, this is of type int"),
        (None, "of type NoneType"),
        ([], "the list of messages is empty"),
        (["1+1?"], "a message is a mapping with role and content, this is '1"),
        ([{"content": "1+1?"}], "a message is a mapping with role and content"),
        ([{"role": "user", "content": 4}], "the content of a message is a text, this one is of type int"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "a part of type 'image'"),
    ],
)
def test_fault_37_prompts_of_a_wrong_type_are_named_with_their_row(prompt: object, message: str) -> None:
    with pytest.raises(DataError, match=r"train\.parquet, row 3: ") as caught:
        write(prompt)
    assert message in str(caught.value)
