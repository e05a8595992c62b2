"""One option as people see it: key, type, default, range, meaning. All taken from the schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.config.display import show
from tandem.config.schema import SECTIONS

_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "true | false",
    str: "text",
    NoneType: "null",
    Any: "any",
}
_PLURALS = {"integer": "integers", "number": "numbers", "text": "texts"}


@dataclass(frozen=True)
class Option:
    """One key of the config."""

    key: str  # with its section, such as `rollout.n`
    type: str  # such as `integer | null`
    default: str
    range: str  # such as `>= 1`; empty where every value of the type is fine
    meaning: str

    @property
    def expected(self) -> str:
        """Type and range in one phrase, for messages."""
        return f"{self.type} ({self.range})" if self.range else self.type


def option(key: str) -> Option:
    """The option `section.key`; KeyError where there is none."""
    field = _field(key)
    return Option(
        key=key,
        type=_type_text(field.annotation),
        default=show(field.get_default(call_default_factory=True)),
        range=_range_text(field.annotation, field.metadata),
        meaning=field.description or "",
    )


def choices(key: str) -> tuple[str, ...]:
    """The words that an option takes, such as `auto`; empty where it takes none."""
    return tuple(_literals(_field(key).annotation))


def accepts(key: str, kind: type) -> bool:
    """True where the option takes a plain value of type `kind`."""
    return kind in {_strip(member) for member in _members(_field(key).annotation)}


def _field(key: str) -> FieldInfo:
    section, _, name = key.partition(".")
    return SECTIONS[section].model_fields[name]


def _strip(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _members(annotation: Any) -> Sequence[Any]:
    bare = _strip(annotation)
    return get_args(bare) if get_origin(bare) in (Union, UnionType) else (annotation,)


def _literals(annotation: Any) -> Iterable[str]:
    for member in _members(annotation):
        bare = _strip(member)
        if get_origin(bare) is Literal:
            yield from get_args(bare)
        elif get_origin(bare) is tuple:
            yield from _literals(get_args(bare)[0])


def _type_text(annotation: Any) -> str:
    members = _members(annotation)
    if len(members) > 1:
        return " | ".join(_type_text(member) for member in members)
    bare = _strip(annotation)
    arguments = get_args(bare)
    if get_origin(bare) is Literal:
        return " | ".join(arguments)
    if get_origin(bare) is tuple:
        item = _type_text(arguments[0])
        many = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"list of {many}{_PLURALS.get(item, item)}"
    if get_origin(bare) is dict:
        return "mapping" if arguments[1] is Any else f"{{name: {_type_text(arguments[1])}}}"
    if isinstance(bare, type) and issubclass(bare, BaseModel):
        keys = (f"{name}: {_type_text(field.annotation)}" for name, field in bare.model_fields.items())
        return "{" + ", ".join(keys) + "}"
    return _NAMES[bare]


def _range_text(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    limits = _limits(metadata)
    for member in _members(annotation):
        bare = _strip(member)
        if get_origin(member) is Annotated:
            for info in get_args(member)[1:]:
                limits += _limits(info.metadata if isinstance(info, FieldInfo) else [info])
        if get_origin(bare) is tuple:
            inner = [_range_text(argument) for argument in get_args(bare) if argument is not Ellipsis]
            alike = len(set(inner)) == 1
            if any(inner):
                limits.append(f"each {inner[0]}" if alike else "; then ".join(text or "any" for text in inner))
    return ", ".join(dict.fromkeys(limits))


def _limits(metadata: Iterable[Any]) -> list[str]:
    return [text for item in metadata if (text := _limit(item))]


def _limit(item: Any) -> str:
    if isinstance(item, Ge):
        return f">= {_bound(item.ge)}"
    if isinstance(item, Gt):
        return f"> {_bound(item.gt)}"
    if isinstance(item, Le):
        return f"<= {_bound(item.le)}"
    if isinstance(item, Lt):
        return f"< {_bound(item.lt)}"
    return ""


def _bound(value: Any) -> str:
    return "2^62" if value == 2**62 else show(value)
