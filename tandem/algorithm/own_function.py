"""An advantage function or a loss function that a user brings: what it may ask for, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter

from tandem.errors import FunctionError

_WHERE_GIVEN = {
    "ref_logprobs": "td.FunctionLoss(your_function, needs_reference=True) asks for ref_logprobs",
    "entropy": "td.FunctionLoss(your_function, needs_entropy=True) asks for entropy",
    "values": "with algorithm.advantage=gae there are values",
    "baselines": "with algorithm.advantage=remax there are baselines",
}


def check_function(kind: str, function: object, protocol: type) -> None:
    """Find out from its signature whether a function can be called with the keywords of `protocol`.

    Args:
        kind: "advantage" or "loss", for messages.
        function: What the user gave.
        protocol: Its `__call__` has all keywords that there are.

    Raises:
        FunctionError: It is no function, or asks for something else.
    """
    known = [name for name, each in _parameters(kind, protocol.__call__).items() if each.kind is Parameter.KEYWORD_ONLY]
    if isinstance(function, type) or not callable(function):
        what = "a class" if isinstance(function, type) else "no function"
        raise FunctionError(
            f"the {kind} {function!r} is {what}", remedy=f"give a function that names some of {', '.join(known)}"
        )
    strangers = [
        name
        for name, each in _parameters(kind, function).items()
        if each.default is Parameter.empty
        and each.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        and (each.kind is Parameter.POSITIONAL_ONLY or name not in known)
    ]
    if strangers:
        raise FunctionError(
            f"the {kind} function {function!r} asks for {', '.join(strangers)}, which Tandem does not know",
            remedy=f"it is called with keywords, and may name {', '.join(known)}; others need a default",
        )


def call_function(kind: str, function: Callable[..., object], given: Mapping[str, object]) -> object:
    """Call it with those of `given` that it names; with all where it takes any keyword.

    Raises:
        FunctionError: It fails, and something that it names is None.
    """
    parameters = _parameters(kind, function)
    takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    named = {name: value for name, value in given.items() if name in parameters}
    try:
        return function(**(given if takes_all else named))
    except (TypeError, AttributeError) as error:
        absent = [name for name, value in named.items() if value is None]
        if not absent:
            raise
        raise FunctionError(
            f"the {kind} function {function!r} fails: {error}; {' and '.join(absent)} are None here",
            remedy="; ".join(_WHERE_GIVEN[name] for name in absent if name in _WHERE_GIVEN),
        ) from error


def _parameters(kind: str, function: Callable[..., object]) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise FunctionError(
            f"the {kind} function {function!r} has no signature that Python can show ({error})",
            remedy="wrap it in a function of your own",
        ) from error
