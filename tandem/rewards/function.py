"""The user's reward: load it from where the config says, and call it for samples."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.errors import RewardError
from tandem.rewards.built_in import BUILT_IN, prepare_built_in
from tandem.rewards.outcome import RESERVED, invalid, read_many, read_one
from tandem.rewards.raised import Raised
from tandem.rewards.sample import Sample, Score
from tandem.rewards.signature import CallPlan, accepted_options, plan_call

# file.py:name or a built-in name; several of them, weighted; one for each data_source; or the function itself.
FunctionChoice = str | Sequence[str] | Mapping[str, str] | Callable[..., Any]


@dataclass(frozen=True)
class WeightedCall:
    """One function and its share in the reward."""

    plan: CallPlan
    weight: float = 1.0


@dataclass(frozen=True)
class RewardFunction:
    """What scores the responses: for each data source (None = any) one function, or several with weights."""

    calls: Mapping[str | None, tuple[WeightedCall, ...]]
    batched: bool = False

    @property
    def asynchronous(self) -> bool:
        """Whether one of the functions is `async def`, so that several calls can be in flight at once."""
        return any(call.plan.asynchronous for calls in self.calls.values() for call in calls)

    async def evaluate(self, samples: Sequence[Sample]) -> list[Score]:
        """The score of each sample; several samples at once only if the function is batched.

        A coroutine for both kinds of function: without an asynchronous one it never waits.

        Raises:
            MemoryError: A function ran out of memory. Anything else that it raises becomes a score without a value.
        """
        scores: list[Score] = [invalid("")] * len(samples)
        for source in dict.fromkeys(sample.data_source for sample in samples):
            rows = [row for row, sample in enumerate(samples) if sample.data_source == source]
            of_source = await self._evaluate_source(source, [samples[row] for row in rows])
            for row, score in zip(rows, of_source, strict=True):
                scores[row] = score
        return scores

    async def _evaluate_source(self, source: str, samples: Sequence[Sample]) -> list[Score]:
        calls = self.calls.get(source, self.calls.get(None))
        if calls is None:
            known = ", ".join(str(name) for name in self.calls)
            missing = invalid(f"no reward function for data_source {source!r} (reward.function has: {known})")
            return [missing] * len(samples)
        columns = [await _call(call.plan, samples) for call in calls]
        if len(calls) == 1:
            (column,) = columns
            return [replace(score, metrics=_named(score.metrics)) for score in column]
        return [_weighted_sum(calls, row) for row in zip(*columns, strict=True)]


async def _call(plan: CallPlan, samples: Sequence[Sample]) -> list[Score]:
    with Raised() as raised:
        returned = plan(samples)
        if plan.asynchronous:
            returned = await returned
    if raised.text is not None:
        failed = invalid(f"reward function {plan.name} raised {raised.text}")
        return [failed] * len(samples)
    return read_many(plan.name, returned, len(samples)) if plan.batched else [read_one(plan.name, returned)]


def _weighted_sum(calls: Sequence[WeightedCall], scores: Sequence[Score]) -> Score:
    """Each function's own reward becomes the metric `reward/<name>`, its further numbers `reward/<name>/<key>`."""
    errors = [score.error for score in scores if score.error is not None]
    if errors:
        return invalid("\n".join(errors))
    total = 0.0
    metrics: dict[str, float] = {}
    for call, score in zip(calls, scores, strict=True):
        assert score.value is not None
        total += call.weight * score.value
        metrics[f"reward/{call.plan.name}"] = score.value
        metrics |= _named(score.metrics, prefix=f"{call.plan.name}/")
    return Score(total, metrics)


def _named(metrics: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    return {f"reward/{prefix}{key}": value for key, value in metrics.items()}


def load_reward(
    choice: FunctionChoice,
    *,
    weights: Mapping[str, float] | None = None,
    options: Mapping[str, Any] | None = None,
    batched: bool = False,
) -> RewardFunction:
    """Load the reward function that `choice` stands for, and check whatever can be checked before the first call.

    Args:
        choice: `file.py:name`, a built-in name, a list of these (weighted sum), {data_source: one of these},
            or a Python function. A class is made here, with the options, and what it makes is called.
        weights: Weight of each function of a list, by its name; 1 for those left out.
        options: Keywords handed to the functions, each to those that take it.
        batched: The functions take lists and return a list.

    Raises:
        RewardError: All that is wrong, at once.
    """
    weights, options = weights or {}, options or {}
    if callable(choice):
        functions = {_name_of(choice): choice}
        names_by_source: dict[str | None, list[str]] = {None: list(functions)}
    else:
        texts_by_source = _texts_by_source(choice)
        functions, short_names = _load_all([text for texts in texts_by_source.values() for text in texts])
        names_by_source = {source: [short_names[t] for t in texts] for source, texts in texts_by_source.items()}
        weights = {short_names.get(name, name): weight for name, weight in weights.items()}
    plans = _plan_all(functions, options, batched)
    several = any(len(names) > 1 for names in names_by_source.values())
    _check_weights(weights, list(functions), several)
    calls = {
        source: tuple(WeightedCall(plans[name], weights.get(name, 1.0)) for name in names)
        for source, names in names_by_source.items()
    }
    return RewardFunction(calls, batched)


def _texts_by_source(choice: str | Sequence[str] | Mapping[str, str]) -> dict[str | None, list[str]]:
    if isinstance(choice, str):
        return {None: [choice]}
    if isinstance(choice, Mapping):
        return {source: [text] for source, text in choice.items()}
    if len(set(choice)) < len(choice):
        raise RewardError(f"reward.function names a function twice: {', '.join(choice)}", remedy="use reward.weights")
    return {None: list(choice)}


def _load_all(texts: Sequence[str]) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """The functions by name, and the name of each text: what follows the colon, or all of it where that is taken."""
    modules: dict[Path, ModuleType] = {}
    loaded: dict[str, Callable[..., Any]] = {}
    problems = []
    for text in dict.fromkeys(texts):
        try:
            loaded[text] = _load_one(text, modules)
        except RewardError as error:
            problems.append(error)
    _raise_all(problems)
    shorts = [text.rpartition(":")[2] for text in loaded]
    clear = {short for short in shorts if shorts.count(short) == 1 and short not in RESERVED}
    names = {text: short if short in clear else text for text, short in zip(loaded, shorts, strict=True)}
    return {names[text]: function for text, function in loaded.items()}, names


def _load_one(text: str, modules: dict[Path, ModuleType]) -> Callable[..., Any]:
    file, colon, name = text.rpartition(":")
    if not colon:
        if text in BUILT_IN:
            return BUILT_IN[text]
        meant = difflib.get_close_matches(text, BUILT_IN, n=1)
        hint = f"did you mean {meant[0]}? " if meant else ""
        remedy = f"{hint}built in are {', '.join(BUILT_IN)}; your own function is file.py:name"
        raise RewardError(f"reward.function: there is no built-in function {text!r}", remedy=remedy)
    path = Path(file).expanduser().resolve()
    if path not in modules:
        modules[path] = _import_file(path, number=len(modules))
    members = vars(modules[path])
    if name not in members:
        there = ", ".join(key for key, value in members.items() if callable(value) and not key.startswith("_"))
        raise RewardError(
            f"reward.function: {path} has no {name!r}", remedy=f"it has {there or 'no function'}; write {file}:name"
        )
    function = members[name]
    if not callable(function):
        raise RewardError(f"reward.function: {name!r} in {path} is a {type(function).__name__}, not a function")
    return function


def _import_file(path: Path, number: int) -> ModuleType:
    if not path.is_file():
        raise RewardError(
            f"reward.function: there is no file {path}", remedy="the path is relative to where the command runs"
        )
    name = f"reward_file_{number}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward.function: {path} is not a Python file", remedy="its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    sys.path.insert(0, str(path.parent))  # its neighbours can be imported, as when it is run as a script
    with Raised() as raised:
        spec.loader.exec_module(module)
    if raised.text is not None:
        raise RewardError(
            f"reward.function: {path} cannot be imported: {raised.text}",
            remedy="mend it: python must be able to run the file",
        )
    return module


def _plan_all(
    functions: Mapping[str, Callable[..., Any]], options: Mapping[str, Any], batched: bool
) -> dict[str, CallPlan]:
    plans: dict[str, CallPlan] = {}
    problems = []
    used: set[str] = set()
    for name, function in functions.items():
        try:
            accepted = accepted_options(function, name, options)
            used |= set(accepted)
            if function is BUILT_IN.get(name):
                prepare_built_in(name, accepted)
            if inspect.isclass(function):
                function = _made(function, name, accepted)
                accepted.clear()  # they have gone into it
            plans[name] = plan_call(function, name, options=accepted, batched=batched)
        except RewardError as error:
            problems.append(error)
    unknown = [option for option in options if option not in used]
    if unknown and not problems:
        remedy = f"remove it, or add a parameter of that name to {' or '.join(functions)}"
        problems.append(RewardError(f"reward.options: no reward function takes {', '.join(unknown)}", remedy=remedy))
    _raise_all(problems)
    return plans


def _made(kind: type, name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """What scores: an instance, made before the first call. It holds what is needed for all calls, such as a model."""
    made: object = None
    with Raised() as raised:
        made = kind(**options)
    if raised.text is not None:
        raise RewardError(
            f"reward class {name} cannot be made with reward.options: {raised.text}",
            remedy="mend the options or the class; where memory ran out, raise reward.memory_gib",
        )
    if not callable(made):
        raise RewardError(
            f"reward class {name}: what it makes cannot be called", remedy="add def __call__(self, response, ...)"
        )
    return made


def _check_weights(weights: Mapping[str, float], names: Sequence[str], several: bool) -> None:
    unknown = [name for name in weights if name not in names]
    if unknown:
        remedy = f"the functions are {', '.join(names)}"
        raise RewardError(f"reward.weights: there is no function {', '.join(unknown)}", remedy=remedy)
    if weights and not several:
        raise RewardError(
            "reward.weights has no effect without several functions", remedy="give reward.function as a list"
        )


def _name_of(function: Callable[..., Any]) -> str:
    """A function's own name; that of the class for other callables, such as partial functions."""
    return function.__name__ if inspect.isroutine(function) or inspect.isclass(function) else type(function).__name__


def _raise_all(problems: Sequence[RewardError]) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise RewardError("\n".join(str(problem) for problem in problems))
