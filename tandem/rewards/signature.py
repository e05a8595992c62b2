"""How a reward function is called, found out once from its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from operator import attrgetter
from typing import Any

from tandem.errors import RewardError
from tandem.rewards.sample import Sample

# Parameter -> the field of a sample that it is given. `solution_str` is verl's word, `completion` is TRL's.
FIELDS: Mapping[str, str] = {
    "response": "response",
    "solution_str": "response",
    "completion": "response",
    "prompt": "prompt",
    "ground_truth": "ground_truth",
    "data_source": "data_source",
    "extra_info": "extra_info",
}
# A batched function may use the plural as well; `extra_infos` and its like are verl's.
BATCH_FIELDS: Mapping[str, str] = {**FIELDS, **{f"{name}s": field for name, field in FIELDS.items()}}

_FIXED_COUNT = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class CallPlan:
    """A reward function with what it is called with: fields by position, fields by keyword, fixed options."""

    name: str
    function: Callable[..., Any]
    positional: tuple[str, ...]
    keywords: Mapping[str, str]
    options: Mapping[str, Any]
    batched: bool
    asynchronous: bool

    def __call__(self, samples: Sequence[Sample]) -> Any:
        """Call the function for `samples`: one of them, or several at once if it is batched."""
        by_position = [self._values(field, samples) for field in self.positional]
        by_keyword = {parameter: self._values(field, samples) for parameter, field in self.keywords.items()}
        return self.function(*by_position, **by_keyword, **self.options)

    def _values(self, field: str, samples: Sequence[Sample]) -> Any:
        read = attrgetter(field)
        if self.batched:
            return [read(sample) for sample in samples]
        (sample,) = samples
        return read(sample)


def accepted_options(function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that `function` takes: all of them if it has a `**kwargs`."""
    parameters = _parameters(function, name).values()
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(options)
    by_keyword = {p.name for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    return {option: value for option, value in options.items() if option in by_keyword}


def plan_call(function: Callable[..., Any], name: str, *, options: Mapping[str, Any], batched: bool) -> CallPlan:
    """Decide how to call `function`.

    It gets by keyword those fields that its signature names (`FIELDS`). A function with exactly two required
    parameters of other names gets (response, ground_truth).

    Raises:
        RewardError: The signature cannot be read, asks for something unknown or does not ask for the response.
    """
    fields = BATCH_FIELDS if batched else FIELDS
    taken = [option for option in options if option in fields]
    if taken:
        raise RewardError(
            f"reward.options: {', '.join(taken)} is a name that Tandem fills in itself",
            remedy=f"rename the parameter; taken are {', '.join(fields)}",
        )
    parameters = [p for p in _parameters(function, name).values() if p.kind in _FIXED_COUNT and p.name not in options]
    given = {p.name: fields[p.name] for p in parameters if p.name in fields}
    required = [p.name for p in parameters if p.default is Parameter.empty]
    strangers = [parameter for parameter in required if parameter not in fields]
    if any(parameter in BATCH_FIELDS for parameter in strangers):
        raise RewardError(
            f"reward function {name}{inspect.signature(function)} seems to take lists, of several responses at once",
            remedy="set reward.batched=true; or give the parameters other names",
        )
    if len(required) == len(strangers) == 2 and all(p.kind is not Parameter.KEYWORD_ONLY for p in parameters[:2]):
        given |= dict(zip(strangers, ("response", "ground_truth"), strict=True))
    elif strangers:
        raise _refused(function, name, f"asks for {', '.join(strangers)}, which Tandem does not know", fields)
    if "response" not in given.values():
        raise _refused(function, name, "does not ask for the response", fields)
    positional = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_ONLY]
    by_position = [parameter for parameter in positional if parameter in given]
    if by_position != positional[: len(by_position)]:
        raise _refused(function, name, "has a positional-only parameter that stands in the way", fields)
    return CallPlan(
        name=name,
        function=function,
        positional=tuple(given[parameter] for parameter in by_position),
        keywords={parameter: field for parameter, field in given.items() if parameter not in by_position},
        options=dict(options),
        batched=batched,
        asynchronous=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
    )


def _parameters(function: Callable[..., Any], name: str) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward function {name} has no signature that Python can show ({error})",
            remedy="wrap it: def reward(response, ground_truth): return ...",
        ) from error


def _refused(function: Callable[..., Any], name: str, problem: str, fields: Mapping[str, str]) -> RewardError:
    return RewardError(
        f"reward function {name}{inspect.signature(function)} {problem}",
        remedy=(
            f"parameters may be called {', '.join(fields)} (given by keyword); others need a default or a value in "
            "reward.options; a function of exactly two required parameters of other names gets (response, ground_truth)"
        ),
    )
