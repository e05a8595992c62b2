"""Settings without effect: somebody wrote them down and expects something of them that will not happen.

Only settings count that differ from the default or the preset, so that a config written out in full, as in a
run's folder, is never at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.config.conflict import Conflict
from tandem.config.document import Given
from tandem.config.presets import PRESETS
from tandem.config.schema import Config, value_of


@dataclass(frozen=True)
class _Idle:
    """Keys that do nothing, because of the setting of `decided_by`."""

    keys: tuple[str, ...]
    decided_by: str
    reason: str
    remedy: str

    def stated(self, config: Config) -> list[str]:
        return [key for key in self.keys if is_stated(config, key)]


def without_effect(config: Config) -> list[Conflict]:
    """All settings that are given and change nothing."""
    conflicts = []
    for idle in _idle(config):
        stated = idle.stated(config)
        if stated:
            others = f" (nor {'have' if stated[2:] else 'has'} {', '.join(stated[1:])})" if stated[1:] else ""
            message = f"has no effect{others}: {idle.reason}"
            remedy = f"{idle.remedy}, or leave {'them' if others else 'it'} out"
            conflicts.append(Conflict((*stated, idle.decided_by), message, remedy))
    return conflicts


def without_overruled(config: Config, given: Given) -> Config:
    """`config` without the file's settings that a choice on the command line takes the effect from: it is later."""
    for idle in _idle(config):
        if given.is_override(idle.decided_by):
            for section, name in (key.split(".") for key in idle.stated(config) if not given.is_override(key)):
                config = Config.model_validate(config.model_dump(exclude={section: {name}}))
    return config


def is_stated(config: Config, key: str) -> bool:
    """True where the value is neither the default nor the preset's."""
    preset = PRESETS[config.algorithm.preset].settings if config.algorithm.preset else {}
    expected = preset[key] if key in preset else value_of(Config(), key)
    return value_of(config, key) != expected


def _idle(config: Config) -> Iterator[_Idle]:
    yield from _idle_of_algorithm(config)
    yield from _idle_of_evaluation(config)
    if config.trainer.lr_schedule == "constant":
        decided_by = "trainer.lr_schedule"
        yield _Idle(("trainer.lr_final",), decided_by, f"{decided_by} is constant", "set it to linear or cosine")
    if not isinstance(config.reward.function, tuple):
        reason, remedy = "weights are for a list of functions", "give reward.function as a list"
        yield _Idle(("reward.weights",), "reward.function", reason, remedy)
    if config.reward.overlong_buffer == 0:
        decided_by = "reward.overlong_buffer"
        yield _Idle(("reward.overlong_penalty",), decided_by, f"{decided_by} is 0", "set it to 1 or more")
    if config.run.steps is not None:
        yield _Idle(("data.epochs",), "run.steps", f"run.steps={config.run.steps} decides", "set run.steps=null")
    if config.model.lora_rank == 0:
        keys, decided_by = ("model.lora_alpha", "model.lora_targets"), "model.lora_rank"
        yield _Idle(keys, decided_by, f"{decided_by} is 0, so there are no adapters", "set it to 1 or more")
    if config.data.chat_template == "never":
        decided_by = "data.chat_template"
        yield _Idle(("data.chat_template_options",), decided_by, f"{decided_by} is never", f"set {decided_by}=auto")
    if config.sft.train is None and config.sft.steps == 0:
        yield _Idle(("sft.batch_size", "sft.lr"), "sft.train", "there is no warm start", "give sft.train and sft.steps")
    if config.cluster.num_workers == 1:
        keys, decided_by = ("cluster.address", "cluster.max_failures"), "cluster.num_workers"
        keys += ("rollout.tensor_parallel", "trainer.replicas")
        reason, remedy = f"{decided_by} is 1, so there is nothing to share", f"set {decided_by} to 2 or more"
        yield _Idle(keys, decided_by, reason, remedy)
    if not {"wandb", "trackio"} & set(config.tracking.to):
        reason, remedy = "only wandb and trackio have projects", "add one of them to tracking.to"
        yield _Idle(("tracking.project",), "tracking.to", reason, remedy)
    if config.tracking.rollouts_every == 0:
        decided_by = "tracking.rollouts_every"
        yield _Idle(("tracking.rollouts_max",), decided_by, f"{decided_by} is 0", "set it to 1 or more")


def _idle_of_algorithm(config: Config) -> Iterator[_Idle]:
    algorithm = config.algorithm
    by_advantage, by_loss, by_kl = "algorithm.advantage", "algorithm.loss", "algorithm.kl_coef"
    advantage = f"{by_advantage} is {algorithm.advantage}"
    if algorithm.advantage != "grpo":
        keys, reason = ("algorithm.normalize_std",), f"{advantage}, and only grpo leaves the choice"
        yield _Idle(keys, by_advantage, reason, f"set {by_advantage}=grpo")
    if algorithm.advantage not in ("gae", "reinforce_plus_plus"):
        keys, reason = ("algorithm.gamma",), f"{advantage}, which discounts nothing"
        yield _Idle(keys, by_advantage, reason, f"set {by_advantage}=gae or reinforce_plus_plus")
    if not algorithm.has_critic:
        keys = ("algorithm.lam", "critic.path", "critic.lr", "critic.warmup_steps", "critic.clip_value")
        yield _Idle(keys, by_advantage, f"{advantage}, which has no critic", f"set {by_advantage}=gae")
    if algorithm.loss != "ppo_clip":
        reason, remedy = f"{by_loss} is {algorithm.loss}, which has no dual clip", f"set {by_loss}=ppo_clip"
        yield _Idle(("algorithm.clip_dual",), by_loss, reason, remedy)
    if algorithm.idle_groups != "resample":
        decided_by = "algorithm.idle_groups"
        reason, remedy = f"{decided_by} is {algorithm.idle_groups}", f"set {decided_by}=resample"
        yield _Idle(("algorithm.max_resample",), decided_by, reason, remedy)
    if algorithm.kl_coef == 0:
        keys = ("algorithm.kl_estimator", "algorithm.kl_place", "algorithm.reference")
        yield _Idle(keys, by_kl, f"{by_kl} is 0, so there is no reference", f"set {by_kl} above 0")


def _idle_of_evaluation(config: Config) -> Iterator[_Idle]:
    if config.evaluation.data is None:
        keys = tuple(f"evaluation.{name}" for name in ("every", "n", "temperature", "metric", "patience"))
        reason, remedy = "there is nothing to evaluate on", "give evaluation.data"
        yield _Idle((*keys, "checkpoint.keep_best"), "evaluation.data", reason, remedy)
    elif config.evaluation.every == 0:
        reason = "evaluation.every is 0, so nothing is evaluated in between"
        yield _Idle(("evaluation.patience",), "evaluation.every", reason, "set it to 1 or more")
