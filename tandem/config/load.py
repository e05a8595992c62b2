"""Read the config from YAML and the command line, and write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.config.checks import contradictions, missing
from tandem.config.conflict import Conflict
from tandem.config.display import quote
from tandem.config.document import Given, Place, read_file, read_value, write_text
from tandem.config.effects import without_effect, without_overruled
from tandem.config.presets import preset_of
from tandem.config.problems import unfit_value, unknown_keys
from tandem.config.schema import SECTIONS, Config
from tandem.config.section import Section
from tandem.errors import ConfigError, Problem


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), *, need_data: bool = True, need_reward: bool = True
) -> Config:
    """Read a run's config: the preset, on top of it the YAML file, on top of that the overrides.

    Args:
        path: The YAML file; None takes the overrides alone.
        overrides: `section.key=value`, the value in YAML. Where a key comes twice, the last one counts.
        need_data: A config without `data.train` is an error.
        need_reward: A config without `reward.function` is an error.

    Raises:
        ConfigError: Everything that is wrong, at once, with file and line.
    """
    given = Given() if path is None else read_file(Path(path))
    for override in overrides:
        _apply_override(given, override)
    return _build(given, need_data=need_data, need_reward=need_reward)


def config_from_dict(values: Mapping[str, Any], *, need_data: bool = True, need_reward: bool = True) -> Config:
    """The config that nested plain values describe, checked like a YAML file.

    Raises:
        ConfigError: Everything that is wrong, at once.
    """
    return _build(Given(values=_plain(values)), need_data=need_data, need_reward=need_reward)


def to_yaml(config: Config) -> str:
    """YAML text of the whole config, in the order of the schema. `load_config` reads it back to an equal config."""
    sections = config.model_dump(mode="json")
    return "\n".join(write_text({name: content}) for name, content in sections.items())


def _plain(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): _plain_value(value) for key, value in values.items()}  # keys are texts, as those of YAML


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _apply_override(given: Given, override: str) -> None:
    key, equals, text = override.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        message = "is no option: expected section.key=value"
        given.problems.append(Problem(override, message, "write it like rollout.n=8", "command line"))
        return
    if not text:
        remedy = f"write {key}=null for no value, or {key}='\"\"' for an empty text"
        given.problems.append(Problem(key, "has no value", remedy, "command line"))
        return
    num_problems = len(given.problems)
    value = read_value(text, path, given)
    if len(given.problems) > num_problems:
        return
    if len(path) == 1 and isinstance(value, dict):
        current = given.values.get(key)
        given.values[key] = {**(current if isinstance(current, dict) else {}), **value}
        return
    parent = given.values
    for depth, name in enumerate(path[:-1], start=1):
        if parent.get(name) is None:
            parent[name] = {}
        inner = parent[name]
        if not isinstance(inner, dict):
            around = ".".join(path[:depth])
            message = f"cannot be set: {around} is no mapping"
            given.problems.append(Problem(key, message, f"set {around} as a whole", "command line"))
            return
        parent = inner
    parent[path[-1]] = value


def _build(given: Given, *, need_data: bool, need_reward: bool) -> Config:
    _choose_model(given)
    unknown = unknown_keys(given)
    problems = [*given.problems, *unknown.problems]
    _apply_preset(given)
    sections: dict[str, Section] = {}
    for name in SECTIONS:
        sections[name], section_problems = _read_section(name, given)
        problems += section_problems
    config = without_overruled(Config.model_validate(sections), given)
    broken = unknown.meant | {problem.key for problem in problems}
    conflicts = [
        *missing(config, need_data=need_data, need_reward=need_reward),
        *contradictions(config),
        *without_effect(config),
    ]
    if given.is_complete:
        problems += [_located(conflict, given) for conflict in conflicts if not _rests_on(conflict, broken)]
    if problems:
        raise ConfigError(sorted(problems, key=_reading_order))
    return config


def _reading_order(problem: Problem) -> tuple[bool, bool, int]:
    """By line of the file, then the command line, then what is missing."""
    _, _, line = (problem.where or "").rpartition(":")
    return problem.where is None, not line.isdigit(), int(line) if line.isdigit() else 0


def _choose_model(given: Given) -> None:
    """model.path on the command line takes the place of the file's model.new and its tokenizer, and the reverse."""
    model = given.values.get("model")
    if not isinstance(model, dict):
        return
    for chosen, replaced in (("path", ("new", "tokenizer")), ("new", ("path",))):
        other = replaced[0]
        is_chosen = model.get(chosen) is not None and given.is_override(f"model.{chosen}")
        if is_chosen and model.get(other) is not None and not given.is_override(f"model.{other}"):
            for key in replaced:
                if not given.is_override(f"model.{key}"):
                    model.pop(key, None)


def _apply_preset(given: Given) -> None:
    preset = preset_of(given.values)
    if preset is None:
        return
    name = given.values["algorithm"]["preset"]
    for key, value in preset.settings.items():
        section, _, option = key.partition(".")
        if given.values.get(section) is None:
            given.values[section] = {}
        content = given.values[section]
        if isinstance(content, dict) and option not in content:
            content[option] = value
            given.places[section, option] = Place(f"preset {name}")


def _read_section(name: str, given: Given) -> tuple[Section, list[Problem]]:
    """The section with defaults in place of unfit values, and the problems."""
    schema = SECTIONS[name]
    content: Any = {} if given.values.get(name) is None else given.values[name]
    if not isinstance(content, dict):
        message = f"got {quote(content)}, expected a section with `key: value` lines under it"
        return schema(), [
            Problem(
                name,
                message,
                f"its keys are {', '.join(schema.model_fields)}; mind the space after a colon",
                given.where((name,)),
            )
        ]
    known = {key: value for key, value in content.items() if key in schema.model_fields}
    try:
        return schema.model_validate(known), []
    except ValidationError as error:
        unfit = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors(include_url=False))
    problems = [unfit_value(f"{name}.{key}", known[key], given.place((name, key))) for key in unfit]
    return schema.model_validate({key: value for key, value in known.items() if key not in unfit}), problems


def _rests_on(conflict: Conflict, broken: set[str]) -> bool:
    """True where a key that takes part could not be read, so that the conflict may not be real."""
    return any(key in broken or key.partition(".")[0] in broken for key in conflict.keys)


def _located(conflict: Conflict, given: Given) -> Problem:
    paths = [tuple(key.split(".")) for key in conflict.keys]
    found = [path for path in paths if given.has(path)]
    where = given.where(found[0] if found else paths[0])
    return Problem(conflict.keys[0], conflict.message, conflict.remedy, where)
