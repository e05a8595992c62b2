"""verl's keys, answered with ours.

`answer` turns a key and value of verl into the settings that say the same here, converted where the unit differs
(verl counts mini-batches in prompts, Tandem in responses), or into a sentence where there is no such key.
Names and meanings: verl's `ppo_trainer.yaml`, https://github.com/volcengine/verl.
"""

from __future__ import annotations

from typing import Any

from tandem.config import verl_values as to
from tandem.config.verl_values import ACTOR, CORRECTION, MODEL, ROLLOUT, Answer, Convert, Flat

_ROOTS = ("actor_rollout_ref.", "critic.", "reward_model.", "custom_reward_function.", "global_profiler.", "ray_")
_ROOTS += ("reward.reward_kwargs.", "reward.reward_manager.", "reward.reward_model.")
# One thing under several names: verl's reward section has moved, and its recipes had names of their own.
_REWARD_KWARGS = ("reward_model.reward_kwargs.", "reward.reward_kwargs.")
_OVERLONG = ("reward_model.overlong_buffer.", *(f"{kwargs}overlong_buffer_cfg." for kwargs in _REWARD_KWARGS))
_LATER = "this version has no such option: leave the key out"
_OWN_ENGINE = "engines work in the workers: leave the key out"
_BY_TOKENS = "see trainer.micro_batch_tokens, in tokens; auto fits it to the memory"
_NAME_IN_FUNCTION = "the name stands in reward.function, after a colon: leave this key out"
_AS_THE_POLICY = "the critic's updates are cut like the policy's: leave the key out"
_SCHEDULES = {"constant": "constant", "cosine": "cosine"}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


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


_TABLE: dict[str, Convert] = {
    # data
    "data.train_files": to.train_files,
    "data.val_files": to.val_files,
    "data.train_batch_size": to.same("data.prompts_per_step"),
    "data.max_response_length": to.same("rollout.max_response_length"),
    "data.truncation": to.truncation,
    "data.filter_overlong_prompts": to.flag(
        on=Answer({"data.over_length": "filter"}), off=Answer({"data.over_length": "error"}, "or left, right, middle")
    ),
    "data.filter_overlong_prompts_workers": to.gone("one process filters: leave the key out"),
    "data.seed": to.same("run.seed"),
    "data.train_max_samples": to.unless_positive("data.max_rows", None),
    "data.apply_chat_template_kwargs": to.same("data.chat_template_options"),
    "data.reward_fn_key": to.same("data.source_key"),
    "data.trust_remote_code": to.same("model.trust_remote_code"),
    "data.tokenizer": to.same("model.tokenizer"),
    "data.val_batch_size": to.gone("held-out prompts are evaluated all at once: leave the key out"),
    "data.return_raw_chat": to.gone("messages go through the chat template, texts do not: leave the key out"),
    # model
    f"{MODEL}path": to.same("model.path"),
    f"{MODEL}tokenizer_path": to.same("model.tokenizer"),
    f"{MODEL}trust_remote_code": to.same("model.trust_remote_code"),
    f"{MODEL}lora_rank": to.same("model.lora_rank"),
    f"{MODEL}lora_alpha": to.same("model.lora_alpha"),
    f"{MODEL}target_modules": to.same("model.lora_targets"),
    f"{MODEL}enable_gradient_checkpointing": to.same("trainer.activation_checkpointing"),
    f"{MODEL}use_remove_padding": to.flag(
        on=Answer(
            {"trainer.packing": "varlen"}, "or auto, the default, which never pads and chooses the cheapest packing"
        ),
        off=Answer({"trainer.packing": "none"}, "one sequence at a time; auto, the default, never pads either"),
    ),
    f"{MODEL}custom_chat_template": to.gone("put the template into a file: data.chat_template=PATH.jinja"),
    # actor
    f"{ACTOR}ppo_mini_batch_size": to.mini_batch,
    f"{ACTOR}ppo_micro_batch_size": to.gone(_BY_TOKENS),
    f"{ACTOR}ppo_micro_batch_size_per_gpu": to.gone(_BY_TOKENS),
    f"{ACTOR}use_dynamic_bsz": to.gone("micro-batches are always cut by tokens: leave the key out"),
    f"{ACTOR}ppo_max_token_len_per_gpu": to.same("trainer.micro_batch_tokens"),
    f"{ACTOR}ppo_epochs": to.same("trainer.update_epochs"),
    f"{ACTOR}shuffle": to.words("trainer.mini_batch_shuffle", {True: "responses", False: "none"}),
    f"{ACTOR}clip_ratio": to.clip_ratio,
    f"{ACTOR}clip_ratio_low": to.same("algorithm.clip_low"),
    f"{ACTOR}clip_ratio_high": to.same("algorithm.clip_high"),
    f"{ACTOR}clip_ratio_c": to.same("algorithm.clip_dual", "off unless you set it"),
    f"{ACTOR}loss_agg_mode": to.words(
        "algorithm.loss_aggregation",
        {
            "token-mean": "token_mean",
            "seq-mean-token-mean": "sequence_mean",
            "seq-mean-token-sum": "sequence_sum",
            "seq-mean-token-sum-norm": "constant",
        },
    ),
    f"{ACTOR}policy_loss.loss_mode": to.words(
        "algorithm.loss",
        {"vanilla": "ppo_clip", "gspo": "gspo", "cispo": "cispo"},
        examples={
            **{name: name for name in ("gpg", "sapo", "clip_cov", "kl_cov")},
            "geo_mean": "gmpo",
            "dppo_kl": "dppo",
            "dppo_tv": "dppo",
        },
        loops=("clip_cov", "kl_cov"),
    ),
    f"{ACTOR}entropy_coeff": to.same("algorithm.entropy_coef"),
    f"{ACTOR}use_kl_loss": to.use_kl_loss,
    f"{ACTOR}kl_loss_coef": to.kl_loss_coef,
    f"{ACTOR}kl_loss_type": to.words("algorithm.kl_estimator", _KL),
    f"{ACTOR}grad_clip": to.same("trainer.max_grad_norm"),
    f"{ACTOR}optim.lr": to.same("trainer.lr"),
    f"{ACTOR}optim.lr_warmup_steps": to.unless_positive("trainer.warmup_steps", 0),
    f"{ACTOR}optim.lr_warmup_steps_ratio": to.warmup_ratio,
    f"{ACTOR}optim.weight_decay": to.same("trainer.weight_decay"),
    f"{ACTOR}optim.betas": to.same("trainer.betas"),
    f"{ACTOR}optim.clip_grad": to.same("trainer.max_grad_norm"),
    f"{ACTOR}optim.warmup_style": to.words("trainer.lr_schedule", _SCHEDULES),
    f"{ACTOR}optim.lr_scheduler_type": to.words("trainer.lr_schedule", _SCHEDULES),
    f"{ACTOR}optim.min_lr_ratio": to.same("trainer.lr_final", "for linear and cosine schedules"),
    f"{ACTOR}fsdp_config.optimizer_offload": to.offload,
    f"{ACTOR}fsdp_config.param_offload": to.offload,
    f"{ACTOR}fsdp_config.fsdp_size": to.fsdp_size,
    f"{ACTOR}ulysses_sequence_parallel_size": to.gone(_LATER),
    "actor_rollout_ref.ref.fsdp_config.param_offload": to.gone("trainer.offload holds for the reference, too"),
    # rollout
    f"{ROLLOUT}name": to.words("rollout.engine", {"vllm": "vllm"}),
    f"{ROLLOUT}mode": to.gone(_OWN_ENGINE),
    f"{ROLLOUT}n": to.same("rollout.n"),
    f"{ROLLOUT}temperature": to.same("rollout.temperature"),
    f"{ROLLOUT}top_p": to.same("rollout.top_p"),
    f"{ROLLOUT}top_k": to.unless_positive("rollout.top_k", None),
    f"{ROLLOUT}dtype": to.same("model.dtype", "in rollout and training alike"),
    f"{ROLLOUT}tensor_model_parallel_size": to.same("rollout.tensor_parallel"),
    f"{ROLLOUT}gpu_memory_utilization": to.gone("see rollout.kv_cache_gib, in GiB; auto fits it to the run"),
    f"{ROLLOUT}max_num_seqs": to.same("rollout.max_concurrent"),
    f"{ROLLOUT}val_kwargs.n": to.same("evaluation.n"),
    f"{ROLLOUT}val_kwargs.temperature": to.same("evaluation.temperature"),
    f"{ROLLOUT}val_kwargs.do_sample": to.gone(
        "evaluation.temperature=0 is greedy, above 0 samples: leave this key out"
    ),
    # algorithm
    "algorithm.adv_estimator": to.words(
        "algorithm.advantage",
        {
            **{name: name for name in ("grpo", "rloo", "remax", "gae")},
            **{name: name for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")},
            "grpo_vectorized": "grpo",
            "rloo_vectorized": "rloo",
        },
        examples={name: name for name in ("opo", "grpo_passk", "gpg", "gdpo")},
    ),
    "algorithm.norm_adv_by_std_in_grpo": to.words("algorithm.normalize_std", {True: "group", False: "none"}),
    "algorithm.use_kl_in_reward": to.words("algorithm.kl_place", {True: "reward", False: "loss"}),
    "algorithm.kl_penalty": to.if_in_reward(to.words("algorithm.kl_estimator", _KL)),
    "algorithm.kl_ctrl.type": to.gone(
        "algorithm.kl_coef is constant: leave the key out, or see examples/losses/adaptive_kl.py, for your own loop"
    ),
    "algorithm.kl_ctrl.kl_coef": to.if_in_reward(to.same("algorithm.kl_coef")),
    "algorithm.filter_groups.enable": to.words("algorithm.idle_groups", {True: "resample", False: "keep"}),
    "algorithm.filter_groups.max_num_gen_batches": to.same("algorithm.max_resample"),
    "algorithm.filter_groups.metric": to.gone("groups are compared by their rewards: leave the key out"),
    f"{CORRECTION}rollout_is": to.rollout_is,
    f"{CORRECTION}rollout_is_threshold": to.correction_range,
    f"{CORRECTION}rollout_rs": to.rollout_rs,
    f"{CORRECTION}rollout_rs_threshold": to.correction_range,
    f"{CORRECTION}bypass_mode": to.words("algorithm.old_logprobs", {True: "rollout", False: "recompute"}),
    f"{ROLLOUT}calculate_log_probs": to.gone("log-probs are always kept while sampling: leave the key out"),
    "algorithm.gamma": to.same("algorithm.gamma"),
    "algorithm.lam": to.same("algorithm.lam"),
    # critic
    "critic.model.path": to.same("critic.path"),
    "critic.optim.lr": to.same("critic.lr"),
    "critic.cliprange_value": to.same("critic.clip_value"),
    "critic.ppo_epochs": to.gone(_AS_THE_POLICY),
    "critic.ppo_mini_batch_size": to.gone(_AS_THE_POLICY),
    # reward
    **{f"{buffer}enable": to.overlong_switch for buffer in _OVERLONG},
    **{f"{buffer}len": to.same("reward.overlong_buffer") for buffer in _OVERLONG},
    **{f"{buffer}penalty_factor": to.same("reward.overlong_penalty") for buffer in _OVERLONG},
    **{
        f"{kwargs}max_resp_len": to.gone("rollout.max_response_length holds here, too: leave the key out")
        for kwargs in _REWARD_KWARGS
    },
    "custom_reward_function.path": to.reward_path,
    "custom_reward_function.name": to.gone(_NAME_IN_FUNCTION),
    "reward.custom_reward_function.path": to.reward_path,
    "reward.custom_reward_function.name": to.gone(_NAME_IN_FUNCTION),
    # trainer
    "trainer.total_epochs": to.same("data.epochs"),
    "trainer.total_training_steps": to.same("run.steps"),
    "trainer.n_gpus_per_node": to.gpus_per_node,
    "trainer.nnodes": to.nodes,
    "trainer.save_freq": to.unless_positive("checkpoint.every", 0),
    "trainer.test_freq": to.unless_positive("evaluation.every", 0),
    "trainer.max_actor_ckpt_to_keep": to.same("checkpoint.keep"),
    "trainer.val_before_train": to.gone("evaluation always runs before the first step: leave the key out"),
    "trainer.val_only": to.gone("use the command `tandem evaluate`"),
    "trainer.resume_mode": to.gone("a run folder that exists goes on by itself; another run.folder starts anew"),
    "trainer.resume_from_path": to.gone("give the folder of the run: run.folder"),
    "trainer.logger": to.logger,
    "trainer.project_name": to.same("tracking.project"),
    "trainer.experiment_name": to.experiment,
    "trainer.default_local_dir": to.same("run.folder"),
    "trainer.rollout_data_dir": to.gone("rollouts are in the run's folder: see tracking.rollouts_every"),
    "trainer.log_val_generations": to.gone("rollouts are in the run's folder: see tracking.rollouts_max"),
    "trainer.critic_warmup": to.same("critic.warmup_steps"),
    "trainer.balance_batch": to.gone("sequences are always spread over the workers by their cost: leave the key out"),
    "trainer.device": to.same("cluster.device"),
}
