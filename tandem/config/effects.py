"""Settings without effect: somebody wrote them down and expects something of them that will not happen.

Only settings count that differ from the default or the preset, so that a config written out in full, as in a
run's folder, is never at fault.
"""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.conflict import Conflict
from tandem.config.presets import PRESETS
from tandem.config.schema import Config, value_of

Reason = tuple[str, str, tuple[str, ...]]  # why the key does nothing, what to do about it, the keys that decide


def without_effect(config: Config) -> list[Conflict]:
    """All settings that are given and change nothing."""
    conflicts = []
    for keys, (reason, remedy, deciding) in _rules(config):
        stated = [key for key in keys if is_stated(config, key)]
        if stated:
            others = f" (nor have {', '.join(stated[1:])})" if stated[1:] else ""
            remedy_in_full = f"{remedy}, or leave {'them' if others else 'it'} out"
            conflicts.append(Conflict((*stated, *deciding), f"has no effect{others}: {reason}", remedy_in_full))
    return conflicts


def is_stated(config: Config, key: str) -> bool:
    """True where the value is neither the default nor the preset's."""
    preset = PRESETS[config.algorithm.preset].settings if config.algorithm.preset else {}
    expected = preset[key] if key in preset else value_of(Config(), key)
    return value_of(config, key) != expected


def _rules(config: Config) -> Iterator[tuple[tuple[str, ...], Reason]]:
    yield from _algorithm_rules(config)
    yield from _data_rules(config)
    yield from _evaluation_rules(config)
    yield from _tracking_rules(config)


def _algorithm_rules(config: Config) -> Iterator[tuple[tuple[str, ...], Reason]]:
    if config.algorithm.kl_coef == 0:
        reason = (
            "algorithm.kl_coef is 0, so there is no reference",
            "set algorithm.kl_coef above 0",
            ("algorithm.kl_coef",),
        )
        yield ("algorithm.kl_estimator", "algorithm.reference"), reason
    if config.trainer.lr_schedule == "constant":
        reason = ("trainer.lr_schedule is constant", "set it to linear or cosine", ("trainer.lr_schedule",))
        yield ("trainer.lr_final",), reason
    if not isinstance(config.reward.function, tuple):
        reason = ("weights are for a list of functions", "give reward.function as a list", ("reward.function",))
        yield ("reward.weights",), reason


def _data_rules(config: Config) -> Iterator[tuple[tuple[str, ...], Reason]]:
    if config.run.steps is not None:
        yield ("data.epochs",), (f"run.steps={config.run.steps} decides", "set run.steps=null", ("run.steps",))
    if config.data.chat_template == "never":
        reason = ("data.chat_template is never", "set data.chat_template=auto", ("data.chat_template",))
        yield ("data.chat_template_options",), reason
    if config.sft.train is None and config.sft.steps == 0:
        yield ("sft.batch_size", "sft.lr"), ("there is no warm start", "give sft.train and sft.steps", ("sft.train",))


def _evaluation_rules(config: Config) -> Iterator[tuple[tuple[str, ...], Reason]]:
    if config.evaluation.data is None:
        keys = tuple(f"evaluation.{name}" for name in ("every", "n", "temperature", "metric", "patience"))
        reason = ("there is nothing to evaluate on", "give evaluation.data", ("evaluation.data",))
        yield (*keys, "checkpoint.keep_best"), reason
    elif config.evaluation.every == 0:
        reason = (
            "evaluation.every is 0, so nothing is evaluated in between",
            "set it to 1 or more",
            ("evaluation.every",),
        )
        yield ("evaluation.patience",), reason


def _tracking_rules(config: Config) -> Iterator[tuple[tuple[str, ...], Reason]]:
    if not {"wandb", "trackio"} & set(config.tracking.to):
        reason = ("only wandb and trackio have projects", "add one of them to tracking.to", ("tracking.to",))
        yield ("tracking.project",), reason
    if config.tracking.rollouts_every == 0:
        reason = ("tracking.rollouts_every is 0", "set it to 1 or more", ("tracking.rollouts_every",))
        yield ("tracking.rollouts_max",), reason
