"""The reference of all options, as plain text for `tandem config` and as Markdown for docs/config.md.

python -m tandem.config.reference > docs/config.md
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Collection

from tandem.config.option import Option, option
from tandem.config.presets import PRESETS
from tandem.config.schema import SECTIONS

_INTRODUCTION = """\
One YAML file per run, one section per part, and `a.b=c` on the command line on top of it. There is no inclusion,
no interpolation and no environment variable. Values on the command line are YAML where they stand in `[]`, `{}` or
quotes, such as `rollout.stop=["###"]` and `model.tokenizer={characters: "0123456789+= "}`; others are numbers, `true`,
`false`, `null`, or texts as they stand: `rollout.n=4`, `rollout.top_k=null`, `data.system_prompt=Answer after ####`.
A run's folder keeps the config with every `auto` that was decided, in `config.yaml`."""


def _options(section: str) -> list[Option]:
    return [option(f"{section}.{name}") for name in SECTIONS[section].model_fields]


def _about(section: str) -> str:
    return inspect.cleandoc(SECTIONS[section].__doc__ or "")


def render_text(sections: Collection[str] = SECTIONS, width: int = 100) -> str:
    """The options of `sections` as plain text, in lines of at most about `width` characters."""
    blocks = []
    for section in sections:
        blocks.append(f"{section}: {_about(section)}\n")
        for item in _options(section):
            limits = f", {item.range}" if item.range else ""
            blocks.append(f"  {item.key} = {item.default}    [{item.type}{limits}]")
            blocks.append(textwrap.fill(item.meaning, width, initial_indent="      ", subsequent_indent="      "))
        blocks.append("")
    return "\n".join([*blocks, *(_preset_lines("  ") if "algorithm" in sections else ()), ""])


def render_markdown() -> str:
    """All options as Markdown: docs/config.md."""
    lines = [
        "# Config",
        "",
        "<!-- Made by `python -m tandem.config.reference > docs/config.md`; do not edit by hand. -->",
        "",
        _INTRODUCTION,
        "",
    ]
    for section in SECTIONS:
        lines += [
            f"## {section}",
            "",
            _about(section),
            "",
            "| key | default | type | range | meaning |",
            "|---|---|---|---|---|",
        ]
        for item in _options(section):
            cells = (f"`{item.key}`", f"`{item.default}`", item.type, item.range, item.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    lines += ["## Presets", "", "`algorithm.preset` sets the keys below; those that you give yourself win.", ""]
    return "\n".join([*lines, *_preset_lines("- ", code="`"), ""])


def _preset_lines(bullet: str, code: str = "") -> list[str]:
    lines = []
    for name, preset in PRESETS.items():
        values = " ".join(f"{key}={item}" for key, item in preset.shown().items())
        lines.append(f"{bullet}{code}algorithm.preset={name}{code}: {preset.about}. Sets {code}{values}{code}")
    return lines


if __name__ == "__main__":
    print(render_markdown(), end="")
