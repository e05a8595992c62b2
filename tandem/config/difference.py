"""What changed between the config of a run and the one it is to go on with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.config.display import show
from tandem.config.schema import Config, leaf_keys, value_of

_FREE_SECTIONS = ("checkpoint", "evaluation", "tracking", "cluster")
_FREE_KEYS = (
    "run.folder",
    "run.steps",
    "run.allow_changes",
    "rollout.tensor_parallel",
    "trainer.replicas",
    "trainer.offload",
)


@dataclass(frozen=True)
class Change:
    """One key with another value."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {show(self.old)} -> {show(self.new)}"


@dataclass(frozen=True)
class Difference:
    """The changes between two configs.

    `free` ones may always be made, `guarded` ones need run.allow_changes, `fixed` ones are never made.
    """

    free: tuple[Change, ...]
    guarded: tuple[Change, ...]
    fixed: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.free or self.guarded or self.fixed)


def difference(old: Config, new: Config) -> Difference:
    """Compare two resolved configs by the rule for resuming: where a run is kept, how long it goes on, what is saved,
    evaluated and tracked, and on which devices in which layout, may change freely, although numbers may differ in their
    last bits then; what the policy learns from may not. From what a critic began, and what adapters are, is
    fixed."""
    changes = [
        Change(key, before, after)
        for key in leaf_keys()
        if (before := value_of(old, key)) != (after := value_of(new, key))
    ]
    fixed_keys = _fixed_keys(old, new)
    fixed = tuple(change for change in changes if change.key in fixed_keys)
    free = tuple(change for change in changes if _is_free(change.key))
    return Difference(free, tuple(change for change in changes if change not in (*fixed, *free)), fixed)


def _fixed_keys(old: Config, new: Config) -> tuple[str, ...]:
    """Those whose new value would have no effect, or not fit what the run has trained."""
    critic = ("critic.path",) if old.algorithm.has_critic and new.algorithm.has_critic else ()
    has_adapters = old.model.lora_rank > 0 or new.model.lora_rank > 0
    adapters = ("model.lora_rank", "model.lora_alpha", "model.lora_targets") if has_adapters else ()
    return (*critic, *adapters)


def _is_free(key: str) -> bool:
    return key in _FREE_KEYS or key.partition(".")[0] in _FREE_SECTIONS
