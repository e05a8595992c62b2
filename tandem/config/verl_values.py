"""Values of verl's keys, turned into the settings that say the same here; `verl_names` has the table of keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Flat = Mapping[str, Any]  # everything given, verl's keys and ours, by dotted key


@dataclass(frozen=True)
class Answer:
    """What to write instead: settings by dotted key, and a note. No settings: the key goes away."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


Convert = Callable[[Any, Flat], Answer]

ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
ROLLOUT = "actor_rollout_ref.rollout."
CORRECTION = "algorithm.rollout_correction."
_IN_REWARD = "algorithm.use_kl_in_reward"


def same(ours: str, note: str = "") -> Convert:
    return lambda value, given: Answer({ours: value}, note)


def words(
    ours: str, table: Mapping[Any, Any], *, examples: Mapping[str, str] | None = None, loops: Collection[str] = ()
) -> Convert:
    """Words for words. `examples` are those that Tandem has as a file, `loops` those of them that need an own loop."""

    def convert(value: Any, given: Flat) -> Answer:
        if isinstance(value, str | bool) and value in table:
            return Answer({ours: table[value]})
        if isinstance(value, str) and examples and value in examples:
            use = (
                "for a loop of your own, see docs/library.md" if value in loops else "you pass the function to td.train"
            )
            return Answer({}, f"see examples/losses/{examples[value]}.py: {use}")
        known = ", ".join(dict.fromkeys(str(word) for word in table.values()))
        return Answer({}, f"see {ours}, which takes {known}")

    return convert


def gone(note: str) -> Convert:
    return lambda value, given: Answer({}, note)


def unless_positive(ours: str, otherwise: int | None) -> Convert:
    """verl writes -1 for `never`, `all` or `none`."""
    return lambda value, given: Answer({ours: value if isinstance(value, int) and value > 0 else otherwise})


def if_in_reward(convert: Convert) -> Convert:
    """For what verl reads only where the KL divergence goes into the rewards."""
    unused = Answer({}, f"without {_IN_REWARD}=true verl ignores it: leave the key out")
    return lambda value, given: convert(value, given) if given.get(_IN_REWARD) is True else unused


def flag(*, on: Answer, off: Answer) -> Convert:
    return lambda value, given: on if value is True else off


def mini_batch(value: Any, given: Flat) -> Answer:
    responses = given.get("rollout.n", given.get(f"{ROLLOUT}n", 8))
    if not isinstance(value, int) or not isinstance(responses, int):
        return Answer({}, "see trainer.mini_batch_responses, in responses: verl's prompts times rollout.n")
    note = f"verl counts {value} prompts, Tandem counts {value} x {responses} responses"
    return Answer({"trainer.mini_batch_responses": value * responses}, note)


def nodes(value: Any, given: Flat) -> Answer:
    return num_workers(value, given.get("trainer.n_gpus_per_node", 8))


def gpus_per_node(value: Any, given: Flat) -> Answer:
    return num_workers(given.get("trainer.nnodes", 1), value)


def num_workers(nodes: Any, gpus: Any) -> Answer:
    if not isinstance(nodes, int) or not isinstance(gpus, int):
        return Answer({}, "see cluster.num_workers, the GPUs of all nodes together")
    note = f"{nodes} nodes with {gpus} GPUs each; cluster.address joins them" if nodes > 1 else ""
    return Answer({"cluster.num_workers": nodes * gpus}, note)


def fsdp_size(value: Any, given: Flat) -> Answer:
    """verl counts the workers that share one copy of the weights, -1 for all; Tandem counts the copies."""
    counted = nodes(given.get("trainer.nnodes", 1), given).settings
    workers = given.get("cluster.num_workers", counted.get("cluster.num_workers"))
    if value == -1:
        return Answer({"trainer.replicas": 1})
    if not isinstance(value, int) or not isinstance(workers, int) or value < 1 or workers % value:
        return Answer({}, "see trainer.replicas, in copies of the weights: cluster.num_workers / fsdp_size")
    note = f"verl counts {value} GPUs for one copy, Tandem counts the copies on {workers}"
    return Answer({"trainer.replicas": workers // value}, note)


def offload(value: Any, given: Flat) -> Answer:
    """Two switches of verl, of which one is enough."""
    is_on = any(given.get(f"{ACTOR}fsdp_config.{kind}_offload") is True for kind in ("param", "optimizer"))
    return Answer({"trainer.offload": "host" if value is True or is_on else "none"}, "for weights and optimizer alike")


def train_files(value: Any, given: Flat) -> Answer:
    if isinstance(value, list) and len(value) > 1:
        return Answer({"data.train": [{"path": path, "weight": 1.0} for path in value]})
    return Answer({"data.train": value[0] if isinstance(value, list) and value else value})


def val_files(value: Any, given: Flat) -> Answer:
    if isinstance(value, list) and len(value) > 1:
        return Answer(
            {"evaluation.data": {f"set{number}": path for number, path in enumerate(value, 1)}}, "name each set"
        )
    return Answer({"evaluation.data": value[0] if isinstance(value, list) and value else value})


def truncation(value: Any, given: Flat) -> Answer:
    if given.get("data.filter_overlong_prompts") is True:
        return Answer({}, "data.filter_overlong_prompts comes first: leave this key out")
    return Answer({"data.over_length": value})


def clip_ratio(value: Any, given: Flat) -> Answer:
    low_high = given.get(f"{ACTOR}clip_ratio_low"), given.get(f"{ACTOR}clip_ratio_high")
    if all(item is not None for item in low_high):
        return Answer({}, "clip_ratio_low and clip_ratio_high come first: leave this key out")
    return Answer({"algorithm.clip_low": value, "algorithm.clip_high": value})


def use_kl_loss(value: Any, given: Flat) -> Answer:
    if value is True:
        return Answer({}, "the KL term is on where algorithm.kl_coef is above 0: leave this key out")
    return Answer({} if given.get(_IN_REWARD) is True else {"algorithm.kl_coef": 0.0})


def kl_loss_coef(value: Any, given: Flat) -> Answer:
    if given.get(f"{ACTOR}use_kl_loss") is True:
        return Answer({"algorithm.kl_coef": value})
    return Answer(use_kl_loss(False, given).settings, "without actor.use_kl_loss=true verl ignores it")


def warmup_ratio(value: Any, given: Flat) -> Answer:
    steps = given.get("run.steps", given.get("trainer.total_training_steps"))
    if isinstance(value, int | float) and isinstance(steps, int):
        return Answer({"trainer.warmup_steps": round(value * steps)}, f"{value} of {steps} steps")
    return Answer({}, "see trainer.warmup_steps, in steps")


def reward_path(value: Any, given: Flat) -> Answer:
    names = ("custom_reward_function.name", "reward.custom_reward_function.name")
    name = next((given[key] for key in names if key in given), "compute_score")
    return Answer({"reward.function": f"{value}:{name}"})


def logger(value: Any, given: Flat) -> Answer:
    names = value if isinstance(value, list) else [value]
    trackers = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    rest = [str(name) for name in names if name not in trackers and name != "console"]
    notes = ["the console is always on"] if "console" in names else []
    notes += [f"there is no {', '.join(rest)}"] if rest else []
    return Answer({"tracking.to": trackers}, "; ".join(notes))


def experiment(value: Any, given: Flat) -> Answer:
    if "trainer.default_local_dir" in given:
        return Answer({}, "the run is known by its folder: leave the key out")
    return Answer({"run.folder": f"runs/{value}"})


def overlong_switch(value: Any, given: Flat) -> Answer:
    if value is True:
        return Answer({}, "it is on where reward.overlong_buffer is above 0: leave this key out")
    return Answer({"reward.overlong_buffer": 0})


def rollout_is(value: Any, given: Flat) -> Answer:
    if value is None:
        return Answer({"algorithm.correction": "none"})
    if value not in ("token", "sequence"):
        return Answer({}, "see algorithm.correction")
    bounds = given.get(f"{CORRECTION}rollout_is_threshold")
    is_range = isinstance(bounds, str) and "_" in bounds
    return Answer({"algorithm.correction": f"{value}_{'mask' if is_range else 'tis'}"})


def rollout_rs(value: Any, given: Flat) -> Answer:
    if value is None:
        return Answer({}, "leave the key out")
    if value == "seq_sum_k1":
        return Answer({"algorithm.correction": "sequence_mask"}, "which also weighs the responses that it keeps")
    return Answer({}, "see algorithm.correction=sequence_mask, which bounds a ratio, not a divergence")


def correction_range(value: Any, given: Flat) -> Answer:
    """verl writes 2.0, or both ends as 0.5_2.0."""
    try:
        ends = [float(end) for end in str(value).split("_")]
    except ValueError:
        return Answer({}, "see algorithm.correction_range")
    return Answer({"algorithm.correction_range": [0.0, *ends][-2:]})
