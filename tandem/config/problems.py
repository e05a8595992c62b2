"""What is wrong with single keys: unknown names and unfit values, each with its remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.config.display import quote, show
from tandem.config.document import Given, KeyPath, Place, scalar_kind
from tandem.config.option import accepts, choices, option
from tandem.config.schema import SECTIONS, leaf_keys
from tandem.config.verl_names import answer, is_name
from tandem.errors import Problem

# Names that other libraries use for the same thing.
_SYNONYMS = {
    "batch_size": "data.prompts_per_step",
    "train_batch_size": "data.prompts_per_step",
    "beta": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "evaluation.every",
    "save_steps": "checkpoint.every",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "group_size": "rollout.n",
    "num_generations": "rollout.n",
    "learning_rate": "trainer.lr",
    "max_completion_length": "rollout.max_response_length",
    "max_new_tokens": "rollout.max_response_length",
    "max_tokens": "rollout.max_response_length",
    "max_steps": "run.steps",
    "num_gpus": "cluster.num_workers",
    "num_iterations": "trainer.update_epochs",
    "num_train_epochs": "data.epochs",
    "output_dir": "run.folder",
    "tensor_parallel_size": "rollout.tensor_parallel",
}
_YES_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}

# What people mean by values that are out of range.
_SAMPLE = "GRPO learns from responses that differ: sample at 1.0; evaluation.temperature may be 0"
_HINTS = {
    ("rollout.temperature", "0"): _SAMPLE,
    ("rollout.temperature", "0.0"): _SAMPLE,
    ("rollout.top_k", "-1"): "write null for no filter",
    ("rollout.top_k", "0"): "write null for no filter",
    ("checkpoint.every", "-1"): "write 0 to save at the end only",
    ("evaluation.every", "-1"): "write 0 to evaluate before and after only",
    ("trainer.offload", "cpu"): "write host, for the host's memory",
    ("model.dtype", "float16"): "write bfloat16 or float32; float16 would need loss scaling",
}


@dataclass
class Unknown:
    """Problems with names, and the valid keys that were probably meant, which count as given."""

    problems: list[Problem] = field(default_factory=list)
    meant: set[str] = field(default_factory=set)


def unknown_keys(given: Given) -> Unknown:
    """Everything in `given` that is no key of the config, verl's names included."""
    unknown = Unknown()
    flat = dict(_nodes(given.values, ()))
    by_name = {".".join(path): value for path, value in flat.items()}
    for path, value in _strangers(given.values):
        key = ".".join(path)
        where = given.where(path)
        found = answer(key, value, by_name)
        if found is None:
            remedy, meant = _suggestion(path, value)
            unknown.problems.append(Problem(key, "there is no such key", remedy, where))
            unknown.meant.update(meant)
            continue
        settings = ", ".join(_setting(ours, item) for ours, item in found.settings.items())
        note = f"({found.note})" if settings and found.note else found.note
        remedy = " ".join(part for part in (f"write {settings}" if settings else "", note) if part) or "leave it out"
        unknown.problems.append(Problem(key, f"is verl's name (given: {show(value)})", remedy, where))
        unknown.meant.update(found.settings)
    return unknown


def unfit_value(key: str, value: Any, place: Place | None) -> Problem:
    """A value of the wrong type, or out of range."""
    written = place.text if place is not None and place.text is not None and not isinstance(value, str) else None
    got = "nothing" if value is None and not written else written or quote(value)
    message = f"got {got}, expected {option(key).expected}"
    return Problem(key, message, _remedy(key, value, got), place.where if place else None)


def _remedy(key: str, value: Any, got: str) -> str | None:
    words = choices(key)
    text = value if isinstance(value, str) else ""
    plain = text.replace("_", "").replace(",", "").strip()
    if (key, text or got) in _HINTS:
        return _HINTS[key, text or got]
    if key == "model.tokenizer" and isinstance(value, Mapping):
        return 'write {characters: "0123"}, with the characters in quotes'
    if value is None:
        return f"leave the key out for the default, {option(key).default}"
    if text.lower() in ("none", "null", "nil") and accepts(key, type(None)):
        return "write null, without quotes"
    if accepts(key, bool) and text.lower() in (*_YES_NO, "true", "false"):
        return f"write {_YES_NO.get(text.lower(), text.lower())}, without quotes"
    if text and (accepts(key, int) or accepts(key, float)) and scalar_kind(plain) in ("int", "float"):
        return f"write {plain}"
    if isinstance(value, float) and value.is_integer() and accepts(key, int):
        return f"write {int(value)}"
    if isinstance(value, bool | int | float) and accepts(key, str):
        return f'put it in quotes: "{got}"'
    if text and option(key).type.startswith("list"):
        return f"write a list: [{quote(text)}]"
    near = difflib.get_close_matches(text.lower().replace("-", "_"), words, n=1, cutoff=0.6) if text else []
    return f"did you mean {near[0]}?" if near else None


def _setting(key: str, value: Any) -> str:
    return f"{key}={show(value)}"


def _nodes(values: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for name, value in values.items():
        yield (*path, name), value
        if isinstance(value, Mapping):
            yield from _nodes(value, (*path, name))


def _strangers(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """Unknown names: verl's one by one, others at the highest level that is unknown."""
    for section, content in values.items():
        if section not in SECTIONS:
            leaves = list(_leaves(content, (section,)))
            is_verl = any(answer(".".join(path), value, {}) for path, value in leaves)
            yield from leaves if is_verl else [((section,), content)]
        elif isinstance(content, Mapping):
            for name, value in content.items():
                if name not in SECTIONS[section].model_fields:
                    leaves = list(_leaves(value, (section, name)))
                    is_verl = any(answer(".".join(path), leaf, {}) for path, leaf in leaves)
                    yield from leaves if is_verl else [((section, name), value)]


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping) and value and not is_name(".".join(path)):
        for name, item in value.items():
            yield from _leaves(item, (*path, name))
    else:
        yield path, value


def _suggestion(path: KeyPath, value: Any) -> tuple[str, tuple[str, ...]]:
    """A remedy, and the keys that it names."""
    key = ".".join(path)
    section, last = path[0], key.rpartition(".")[2]
    if key in leaf_keys():
        head, _, name = key.partition(".")
        return f"in YAML, write `{name}: {show(value)}` under `{head}:`", (key,)
    if isinstance(value, Mapping) and len(path) == 1:
        near = difflib.get_close_matches(section, SECTIONS, n=1)
        return (f"did you mean the section {near[0]}?", ()) if near else (f"the sections are {', '.join(SECTIONS)}", ())
    same_name = tuple(known for known in leaf_keys() if known.endswith(f".{last}"))
    joined = tuple(known for known in leaf_keys() if known.replace(".", "_") == key.replace(".", "_"))  # data_epochs
    if joined:
        same_name = joined
    elif last in _SYNONYMS:
        same_name = (_SYNONYMS[last],)
    if not same_name:
        same_name = _near(section, last)
    if same_name:
        return f"did you mean {' or '.join(same_name)}?", same_name
    if section in SECTIONS:
        return f"{section} takes {', '.join(SECTIONS[section].model_fields)}", ()
    return "`tandem config` lists all options", ()


def _near(section: str, last: str) -> tuple[str, ...]:
    names = SECTIONS[section].model_fields if section in SECTIONS else {}
    close = difflib.get_close_matches(last, names, n=1, cutoff=0.55)
    if close:
        return (f"{section}.{close[0]}",)
    by_name: dict[str, list[str]] = {}
    for key in leaf_keys():
        by_name.setdefault(key.partition(".")[2], []).append(key)
    wider = difflib.get_close_matches(last, by_name, n=1, cutoff=0.75)
    return tuple(by_name[wider[0]]) if wider else ()
