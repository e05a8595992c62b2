"""YAML in and out: values together with the place where each was written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tandem.errors import Problem

KeyPath = tuple[str, ...]

# The scalars of YAML 1.2: 1e-5 is a number, `no` and 2024-01-01 are texts, 1_000 and 0o17 are not read as numbers.
_INT = re.compile(r"[-+]?[0-9]+\Z")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
)
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_NULL = re.compile(r"(?:null|Null|NULL|~|)\Z")
_PATTERNS = {"null": _NULL, "bool": _BOOL, "int": _INT, "float": _FLOAT}
_TAG = "tag:yaml.org,2002:"
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Place:
    """Where a value was given, and for a scalar the text as it was written there."""

    where: str | None
    text: str | None = None


@dataclass
class Given:
    """What a user gave: nested values, the place of each, and what could not be read."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    is_complete: bool = True  # False where a file could not be read, so that what is missing is not known

    def has(self, path: KeyPath) -> bool:
        """Whether there is a value at `path`; one that a program has given has no place."""
        values: object = self.values
        for name in path:
            if not isinstance(values, dict) or name not in values:
                return False
            values = values[name]
        return True

    def place(self, path: KeyPath) -> Place | None:
        """The place of `path`; without one, of a key inside of it, or of the nearest key around it."""
        if path in self.places:
            return self.places[path]
        inside = (place for other, place in self.places.items() if path and other[: len(path)] == path)
        around = (self.places[path[:end]] for end in range(len(path) - 1, 0, -1) if path[:end] in self.places)
        found = next(inside, None) or next(around, None)
        return Place(found.where) if found else None

    def is_override(self, key: str) -> bool:
        """True where the value of the dotted key, or without one the first key inside of it, is the command line's."""
        path = tuple(key.split("."))
        own = [place.where for other, place in self.places.items() if other[: len(path)] == path]
        return own[:1] == [COMMAND_LINE]

    def where(self, path: KeyPath) -> str | None:
        """In words, the place of `path`."""
        place = self.place(path)
        return place.where if place else None


class _Loader(yaml.SafeLoader):
    """Composes nodes only, scalars by YAML 1.2. Aliases are refused: they could make a small file endlessly large."""

    @override
    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        if self.check_event(AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not supported: write the value again", problem_mark=mark
            )
        return super().compose_node(parent, index)

    @override
    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> str:
        is_plain_scalar = kind is ScalarNode and implicit[0]
        return f"{_TAG}{scalar_kind(value)}" if is_plain_scalar else super().resolve(kind, value, implicit)


def read_file(path: Path) -> Given:
    """Read a YAML file; nothing is raised, problems are collected."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = Problem(str(path), f"is not UTF-8 text: {error.reason} at byte {error.start}", "save it as UTF-8")
        return Given(problems=[problem], is_complete=False)
    except OSError as error:
        problem = Problem(
            str(path), f"cannot be read: {error.strerror}", f"give the path of a YAML file, as seen from {Path.cwd()}"
        )
        return Given(problems=[problem], is_complete=False)
    return read_text(text, str(path))


def read_text(text: str, name: str) -> Given:
    """Read YAML text. `name` stands before the line numbers in messages."""
    given = Given()
    node = _compose(text, name, given)
    if node is None:
        given.is_complete = not given.problems
        return given
    if not isinstance(node, MappingNode):
        message = "holds no `section:` with `key: value` lines under it"
        remedy = "begin with a section such as `rollout:`; mind the space after a colon"
        given.problems.append(Problem(name, message, remedy))
        given.is_complete = False
        return given
    given.values = _Reader(given, name).mapping(node, ())
    return given


def read_value(text: str, path: KeyPath, given: Given) -> Any:
    """Read the value of `a.b=value` from the command line: YAML where it is all in {}, [] or quotes.

    Anything else is a number, true, false, null, or a text as it stands, ` #` and `: ` included. What cannot be read
    is noted in `given.problems`, and the text itself is returned.
    """
    where, bare = COMMAND_LINE, text.strip()
    given.places[path] = Place(where, text)
    if not bare.startswith(("{", "[", '"', "'")):
        return _convert(scalar_kind(bare), bare) if bare and scalar_kind(bare) != "str" else text
    node = _compose(bare, where, given, key=".".join(path))
    if node is None or node.end_mark.index < len(bare):  # the rest would be lost as a comment
        return text
    given.places[path] = Place(where, node.value if isinstance(node, ScalarNode) else None)
    return _Reader(given, None).value(node, path)


def _compose(text: str, name: str, given: Given, key: str | None = None) -> Node | None:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        where = f"{name}:{error.problem_mark.line + 1}" if error.problem_mark and key is None else name
        remedy = "mind indentation and the space after a colon; put a text with special characters in quotes"
        given.problems.append(Problem(key or "YAML", f"cannot be read: {error.problem}", remedy, where))
    except yaml.YAMLError as error:
        given.problems.append(Problem(key or "YAML", f"cannot be read: {error}", None, name))
    finally:
        if loader is not None:
            loader.dispose()
    return None


class _Reader:
    """Turns nodes into values and notes their places."""

    def __init__(self, given: Given, name: str | None) -> None:
        self.given = given
        self.name = name

    def mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self._problem(path, key_node, "has a key that is no plain text")
                continue
            key = key_node.value
            inner = (*path, key)
            if key in values:
                self._problem(
                    inner, key_node, f"is given twice, first in {self.given.where(inner)}", "keep one of them"
                )
                continue
            text = value_node.value if isinstance(value_node, ScalarNode) else None
            self.given.places[inner] = Place(self._where(key_node), text)
            values[key] = self.value(value_node, inner)
        return values

    def value(self, node: Node, path: KeyPath) -> Any:
        if isinstance(node, MappingNode):
            return self.mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        kind = node.tag.removeprefix(_TAG)
        if kind != "str" and (kind not in _PATTERNS or not _PATTERNS[kind].match(node.value)):
            self._problem(path, node, f"has the tag {node.tag}, which cannot be read here", "leave the tag out")
            return node.value
        return _convert(kind, node.value)

    def _where(self, node: Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.name else COMMAND_LINE

    def _problem(self, path: KeyPath, node: Node, message: str, remedy: str | None = None) -> None:
        self.given.problems.append(Problem(".".join(path) or "YAML", message, remedy, self._where(node)))


def scalar_kind(text: str) -> str:
    """What an unquoted scalar is in YAML 1.2: null, bool, int, float or str."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.match(text)), "str")


def _convert(kind: str, text: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes what any version of YAML would read as something else than a text; short lists stay on one line."""


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> Node:
    is_flat = not any(isinstance(item, (list, dict)) for item in items)
    return dumper.represent_sequence(f"{_TAG}seq", items, flow_style=is_flat)


def _represent_str(dumper: yaml.SafeDumper, text: str) -> Node:
    return dumper.represent_scalar(f"{_TAG}str", text, style='"' if "\n" in text else None)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_str)
_Dumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


def write_text(values: Mapping[str, Any]) -> str:
    """YAML text of nested plain values, in the given order, that `read_text` reads back unchanged."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
