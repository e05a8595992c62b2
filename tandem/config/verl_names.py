"""verl's keys, answered with ours.

`answer` turns a key and value of verl into the settings that say the same here, converted where the unit differs
(verl counts mini-batches in prompts, Tandem in responses), or into a sentence where there is no such key.
Names and meanings: verl's `ppo_trainer.yaml`, https://github.com/volcengine/verl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
_CORRECTION = "algorithm.rollout_correction."
_ROOTS = ("actor_rollout_ref.", "critic.", "reward_model.", "custom_reward_function.", "global_profiler.", "ray_")
_LATER = "this version has no such option: leave the key out"
_NO_LORA = "this version trains all weights, without LoRA: leave the key out"
_OWN_ENGINE = "engines work in the workers: leave the key out"
_BY_TOKENS = "see trainer.micro_batch_tokens, in tokens; auto fits it to the memory"
_NAME_IN_FUNCTION = "the name stands in reward.function, after a colon: leave this key out"
_LOSS_ONLY = "this version has the KL term in the loss only"
_SCHEDULES = {"constant": "constant", "cosine": "cosine"}


def is_name(key: str) -> bool:
    """True where the table has this key of verl, so that its value is one value, not more keys."""
    return key.lstrip("+~") in _TABLE


def answer(key: str, value: Any, given: Flat) -> Answer | None:
    """Our answer to a key of verl; None where it is none of verl's.

    Args:
        key: Dotted key; the + or ~ that Hydra takes before it are ignored.
        value: Its value.
        given: Everything given, since some values depend on others.
    """
    name = key.lstrip("+~")
    if isinstance(value, str) and "${" in value and name in _TABLE:
        ours = " and ".join(_TABLE[name](value, given).settings) or "the key"
        return Answer({}, f"there is no interpolation here: write {ours} with the value itself")
    if name in _TABLE:
        return _TABLE[name](value, given)
    if name.startswith(_ROOTS):
        return Answer({}, "Tandem has no counterpart: leave the key out (`tandem config` lists all options)")
    return None


def _same(ours: str, note: str = "") -> Convert:
    return lambda value, given: Answer({ours: value}, note)


def _words(ours: str, words: Mapping[Any, Any]) -> Convert:
    def convert(value: Any, given: Flat) -> Answer:
        if isinstance(value, str | bool) and value in words:
            return Answer({ours: words[value]})
        known = ", ".join(str(word) for word in words.values())
        return Answer({}, f"see {ours}, which takes {known}")

    return convert


def _gone(note: str) -> Convert:
    return lambda value, given: Answer({}, note)


def _unless_positive(ours: str, otherwise: int | None) -> Convert:
    """verl writes -1 for `never`, `all` or `none`."""
    return lambda value, given: Answer({ours: value if isinstance(value, int) and value > 0 else otherwise})


def _only(ours: str, name: str) -> Convert:
    """For what this version has one kind of: `ours`, which verl calls `name`."""

    def convert(value: Any, given: Flat) -> Answer:
        has = f"{ours} is what this version does" if value == name else f"this version has {ours} only, not {value}"
        return Answer({}, f"{has}: leave the key out")

    return convert


def _flag(*, on: Answer, off: Answer) -> Convert:
    return lambda value, given: on if value is True else off


def _mini_batch(value: Any, given: Flat) -> Answer:
    responses = given.get("rollout.n", given.get(f"{ROLLOUT}n", 8))
    if not isinstance(value, int) or not isinstance(responses, int):
        return Answer({}, "see trainer.mini_batch_responses, in responses: verl's prompts times rollout.n")
    note = f"verl counts {value} prompts, Tandem counts {value} x {responses} responses"
    return Answer({"trainer.mini_batch_responses": value * responses}, note)


def _nodes(value: Any, given: Flat) -> Answer:
    return _num_workers(value, given.get("trainer.n_gpus_per_node", 8))


def _gpus_per_node(value: Any, given: Flat) -> Answer:
    return _num_workers(given.get("trainer.nnodes", 1), value)


def _num_workers(nodes: Any, gpus: Any) -> Answer:
    if not isinstance(nodes, int) or not isinstance(gpus, int):
        return Answer({}, "see cluster.num_workers, the GPUs of all nodes together")
    note = f"{nodes} nodes with {gpus} GPUs each; cluster.address joins them" if nodes > 1 else ""
    return Answer({"cluster.num_workers": nodes * gpus}, note)


def _fsdp_size(value: Any, given: Flat) -> Answer:
    """verl counts the workers that share one copy of the weights, -1 for all; Tandem counts the copies."""
    counted = _nodes(given.get("trainer.nnodes", 1), given).settings
    workers = given.get("cluster.num_workers", counted.get("cluster.num_workers"))
    if value == -1:
        return Answer({"trainer.replicas": 1})
    if not isinstance(value, int) or not isinstance(workers, int) or value < 1 or workers % value:
        return Answer({}, "see trainer.replicas, in copies of the weights: cluster.num_workers / fsdp_size")
    note = f"verl counts {value} GPUs for one copy, Tandem counts the copies on {workers}"
    return Answer({"trainer.replicas": workers // value}, note)


def _offload(value: Any, given: Flat) -> Answer:
    """Two switches of verl, of which one is enough."""
    is_on = any(given.get(f"{ACTOR}fsdp_config.{kind}_offload") is True for kind in ("param", "optimizer"))
    return Answer({"trainer.offload": "host" if value is True or is_on else "none"}, "for weights and optimizer alike")


def _train_files(value: Any, given: Flat) -> Answer:
    if isinstance(value, list) and len(value) > 1:
        return Answer({"data.train": [{"path": path, "weight": 1.0} for path in value]})
    return Answer({"data.train": value[0] if isinstance(value, list) and value else value})


def _val_files(value: Any, given: Flat) -> Answer:
    if isinstance(value, list) and len(value) > 1:
        return Answer(
            {"evaluation.data": {f"set{number}": path for number, path in enumerate(value, 1)}}, "name each set"
        )
    return Answer({"evaluation.data": value[0] if isinstance(value, list) and value else value})


def _truncation(value: Any, given: Flat) -> Answer:
    if given.get("data.filter_overlong_prompts") is True:
        return Answer({}, "data.filter_overlong_prompts comes first: leave this key out")
    return Answer({"data.over_length": value})


def _clip_ratio(value: Any, given: Flat) -> Answer:
    low_high = given.get(f"{ACTOR}clip_ratio_low"), given.get(f"{ACTOR}clip_ratio_high")
    if all(item is not None for item in low_high):
        return Answer({}, "clip_ratio_low and clip_ratio_high come first: leave this key out")
    return Answer({"algorithm.clip_low": value, "algorithm.clip_high": value})


def _kl_coef(value: Any, given: Flat) -> Answer:
    if given.get(f"{ACTOR}use_kl_loss") is not True:
        return Answer({"algorithm.kl_coef": 0.0}, "without actor.use_kl_loss=true verl ignores it")
    return Answer({"algorithm.kl_coef": value})


def _warmup_ratio(value: Any, given: Flat) -> Answer:
    steps = given.get("run.steps", given.get("trainer.total_training_steps"))
    if isinstance(value, int | float) and isinstance(steps, int):
        return Answer({"trainer.warmup_steps": round(value * steps)}, f"{value} of {steps} steps")
    return Answer({}, "see trainer.warmup_steps, in steps")


def _reward_path(value: Any, given: Flat) -> Answer:
    names = ("custom_reward_function.name", "reward.custom_reward_function.name")
    name = next((given[key] for key in names if key in given), "compute_score")
    return Answer({"reward.function": f"{value}:{name}"})


def _logger(value: Any, given: Flat) -> Answer:
    names = value if isinstance(value, list) else [value]
    trackers = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    rest = [str(name) for name in names if name not in trackers and name != "console"]
    notes = ["the console is always on"] if "console" in names else []
    notes += [f"there is no {', '.join(rest)}"] if rest else []
    return Answer({"tracking.to": trackers}, "; ".join(notes))


def _experiment(value: Any, given: Flat) -> Answer:
    if "trainer.default_local_dir" in given:
        return Answer({}, "the run is known by its folder: leave the key out")
    return Answer({"run.folder": f"runs/{value}"})


def _filter_groups(value: Any, given: Flat) -> Answer:
    note = "this version does not draw again; algorithm.idle_groups=drop leaves groups without contrast out of the loss"
    return Answer({}, note) if value is True else Answer({"algorithm.idle_groups": "keep"})


def _rollout_is(value: Any, given: Flat) -> Answer:
    if value is None:
        return Answer({"algorithm.correction": "none"})
    if value not in ("token", "sequence"):
        return Answer({}, "see algorithm.correction")
    bounds = given.get(f"{_CORRECTION}rollout_is_threshold")
    is_range = isinstance(bounds, str) and "_" in bounds
    return Answer({"algorithm.correction": f"{value}_{'mask' if is_range else 'tis'}"})


def _rollout_rs(value: Any, given: Flat) -> Answer:
    if value is None:
        return Answer({}, "leave the key out")
    if value == "seq_sum_k1":
        return Answer({"algorithm.correction": "sequence_mask"}, "which also weighs the responses that it keeps")
    return Answer({}, "see algorithm.correction=sequence_mask, which bounds a ratio, not a divergence")


def _correction_range(value: Any, given: Flat) -> Answer:
    """verl writes 2.0, or both ends as 0.5_2.0."""
    try:
        ends = [float(end) for end in str(value).split("_")]
    except ValueError:
        return Answer({}, "see algorithm.correction_range")
    return Answer({"algorithm.correction_range": [0.0, *ends][-2:]})


_TABLE: dict[str, Convert] = {
    # data
    "data.train_files": _train_files,
    "data.val_files": _val_files,
    "data.train_batch_size": _same("data.prompts_per_step"),
    "data.max_response_length": _same("rollout.max_response_length"),
    "data.truncation": _truncation,
    "data.filter_overlong_prompts": _flag(
        on=Answer({"data.over_length": "filter"}), off=Answer({"data.over_length": "error"}, "or left, right, middle")
    ),
    "data.filter_overlong_prompts_workers": _gone("one process filters: leave the key out"),
    "data.seed": _same("run.seed"),
    "data.train_max_samples": _unless_positive("data.max_rows", None),
    "data.apply_chat_template_kwargs": _same("data.chat_template_options"),
    "data.reward_fn_key": _same("data.source_key"),
    "data.trust_remote_code": _same("model.trust_remote_code"),
    "data.tokenizer": _same("model.tokenizer"),
    "data.val_batch_size": _gone("held-out prompts are evaluated all at once: leave the key out"),
    "data.return_raw_chat": _gone("messages go through the chat template, texts do not: leave the key out"),
    # model
    f"{MODEL}path": _same("model.path"),
    f"{MODEL}tokenizer_path": _same("model.tokenizer"),
    f"{MODEL}trust_remote_code": _same("model.trust_remote_code"),
    f"{MODEL}lora_rank": _gone(_NO_LORA),
    f"{MODEL}lora_alpha": _gone(_NO_LORA),
    f"{MODEL}target_modules": _gone(_NO_LORA),
    f"{MODEL}enable_gradient_checkpointing": _same("trainer.activation_checkpointing"),
    f"{MODEL}use_remove_padding": _flag(
        on=Answer(
            {"trainer.packing": "varlen"}, "or auto, the default, which never pads and chooses the cheapest packing"
        ),
        off=Answer({"trainer.packing": "none"}, "one sequence at a time; auto, the default, never pads either"),
    ),
    f"{MODEL}custom_chat_template": _gone("put the template into a file: data.chat_template=PATH.jinja"),
    # actor
    f"{ACTOR}ppo_mini_batch_size": _mini_batch,
    f"{ACTOR}ppo_micro_batch_size": _gone(_BY_TOKENS),
    f"{ACTOR}ppo_micro_batch_size_per_gpu": _gone(_BY_TOKENS),
    f"{ACTOR}use_dynamic_bsz": _gone("micro-batches are always cut by tokens: leave the key out"),
    f"{ACTOR}ppo_max_token_len_per_gpu": _same("trainer.micro_batch_tokens"),
    f"{ACTOR}ppo_epochs": _same("trainer.update_epochs"),
    f"{ACTOR}shuffle": _words("trainer.mini_batch_shuffle", {True: "responses", False: "none"}),
    f"{ACTOR}clip_ratio": _clip_ratio,
    f"{ACTOR}clip_ratio_low": _same("algorithm.clip_low"),
    f"{ACTOR}clip_ratio_high": _same("algorithm.clip_high"),
    f"{ACTOR}clip_ratio_c": _same("algorithm.clip_dual", "off unless you set it"),
    f"{ACTOR}loss_agg_mode": _words(
        "algorithm.loss_aggregation",
        {
            "token-mean": "token_mean",
            "seq-mean-token-mean": "sequence_mean",
            "seq-mean-token-sum": "sequence_sum",
            "seq-mean-token-sum-norm": "constant",
        },
    ),
    f"{ACTOR}policy_loss.loss_mode": _only("the clipped surrogate", "vanilla"),
    f"{ACTOR}entropy_coeff": _same("algorithm.entropy_coef"),
    f"{ACTOR}use_kl_loss": _flag(
        on=Answer({}, "the KL term is on where algorithm.kl_coef is above 0: leave this key out"),
        off=Answer({"algorithm.kl_coef": 0.0}),
    ),
    f"{ACTOR}kl_loss_coef": _kl_coef,
    f"{ACTOR}kl_loss_type": _words(
        "algorithm.kl_estimator", {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    ),
    f"{ACTOR}grad_clip": _same("trainer.max_grad_norm"),
    f"{ACTOR}optim.lr": _same("trainer.lr"),
    f"{ACTOR}optim.lr_warmup_steps": _unless_positive("trainer.warmup_steps", 0),
    f"{ACTOR}optim.lr_warmup_steps_ratio": _warmup_ratio,
    f"{ACTOR}optim.weight_decay": _same("trainer.weight_decay"),
    f"{ACTOR}optim.betas": _same("trainer.betas"),
    f"{ACTOR}optim.clip_grad": _same("trainer.max_grad_norm"),
    f"{ACTOR}optim.warmup_style": _words("trainer.lr_schedule", _SCHEDULES),
    f"{ACTOR}optim.lr_scheduler_type": _words("trainer.lr_schedule", _SCHEDULES),
    f"{ACTOR}optim.min_lr_ratio": _same("trainer.lr_final", "for linear and cosine schedules"),
    f"{ACTOR}fsdp_config.optimizer_offload": _offload,
    f"{ACTOR}fsdp_config.param_offload": _offload,
    f"{ACTOR}fsdp_config.fsdp_size": _fsdp_size,
    f"{ACTOR}ulysses_sequence_parallel_size": _gone(_LATER),
    "actor_rollout_ref.ref.fsdp_config.param_offload": _gone("trainer.offload holds for the reference, too"),
    # rollout
    f"{ROLLOUT}name": _words("rollout.engine", {"vllm": "vllm"}),
    f"{ROLLOUT}mode": _gone(_OWN_ENGINE),
    f"{ROLLOUT}n": _same("rollout.n"),
    f"{ROLLOUT}temperature": _same("rollout.temperature"),
    f"{ROLLOUT}top_p": _same("rollout.top_p"),
    f"{ROLLOUT}top_k": _unless_positive("rollout.top_k", None),
    f"{ROLLOUT}dtype": _same("model.dtype", "in rollout and training alike"),
    f"{ROLLOUT}tensor_model_parallel_size": _same("rollout.tensor_parallel"),
    f"{ROLLOUT}gpu_memory_utilization": _gone("see rollout.kv_cache_gib, in GiB; auto fits it to the run"),
    f"{ROLLOUT}max_num_seqs": _same("rollout.max_concurrent"),
    f"{ROLLOUT}val_kwargs.n": _same("evaluation.n"),
    f"{ROLLOUT}val_kwargs.temperature": _same("evaluation.temperature"),
    f"{ROLLOUT}val_kwargs.do_sample": _gone("evaluation.temperature=0 is greedy, above 0 samples: leave this key out"),
    # algorithm
    "algorithm.adv_estimator": _only("GRPO", "grpo"),
    "algorithm.norm_adv_by_std_in_grpo": _words("algorithm.normalize_std", {True: "group", False: "none"}),
    "algorithm.use_kl_in_reward": _flag(
        on=Answer({}, f"{_LOSS_ONLY}: see algorithm.kl_coef"),
        off=Answer({}, "the KL term is in the loss always: leave the key out"),
    ),
    "algorithm.kl_penalty": _gone(f"{_LOSS_ONLY}: see algorithm.kl_estimator"),
    "algorithm.kl_ctrl.type": _gone("algorithm.kl_coef is constant: leave the key out"),
    "algorithm.kl_ctrl.kl_coef": _gone(f"{_LOSS_ONLY}: see algorithm.kl_coef"),
    "algorithm.filter_groups.enable": _filter_groups,
    f"{_CORRECTION}rollout_is": _rollout_is,
    f"{_CORRECTION}rollout_is_threshold": _correction_range,
    f"{_CORRECTION}rollout_rs": _rollout_rs,
    f"{_CORRECTION}rollout_rs_threshold": _correction_range,
    f"{_CORRECTION}bypass_mode": _words("algorithm.old_logprobs", {True: "rollout", False: "recompute"}),
    f"{ROLLOUT}calculate_log_probs": _gone("log-probs are always kept while sampling: leave the key out"),
    "algorithm.gamma": _gone("GRPO has no discount: leave the key out"),
    "algorithm.lam": _gone("GRPO has no lambda: leave the key out"),
    # reward
    "custom_reward_function.path": _reward_path,
    "custom_reward_function.name": _gone(_NAME_IN_FUNCTION),
    "reward.custom_reward_function.path": _reward_path,
    "reward.custom_reward_function.name": _gone(_NAME_IN_FUNCTION),
    # trainer
    "trainer.total_epochs": _same("data.epochs"),
    "trainer.total_training_steps": _same("run.steps"),
    "trainer.n_gpus_per_node": _gpus_per_node,
    "trainer.nnodes": _nodes,
    "trainer.save_freq": _unless_positive("checkpoint.every", 0),
    "trainer.test_freq": _unless_positive("evaluation.every", 0),
    "trainer.max_actor_ckpt_to_keep": _same("checkpoint.keep"),
    "trainer.val_before_train": _gone("evaluation always runs before the first step: leave the key out"),
    "trainer.val_only": _gone("use the command `tandem evaluate`"),
    "trainer.resume_mode": _gone("a run folder that exists goes on by itself; another run.folder starts anew"),
    "trainer.resume_from_path": _gone("give the folder of the run: run.folder"),
    "trainer.logger": _logger,
    "trainer.project_name": _same("tracking.project"),
    "trainer.experiment_name": _experiment,
    "trainer.default_local_dir": _same("run.folder"),
    "trainer.rollout_data_dir": _gone("rollouts are in the run's folder: see tracking.rollouts_every"),
    "trainer.log_val_generations": _gone("rollouts are in the run's folder: see tracking.rollouts_max"),
    "trainer.critic_warmup": _gone("GRPO has no critic: leave the key out"),
    "trainer.balance_batch": _gone("sequences are always spread over the workers by their cost: leave the key out"),
    "trainer.device": _same("cluster.device"),
}
