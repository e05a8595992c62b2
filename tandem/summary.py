"""What a run says of itself before its first step and after its last."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tandem.algorithm.losses import ClippedSurrogate
from tandem.algorithm.protocols import Loss
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.schema import Config
from tandem.hybrid.workers import Workers
from tandem.model.facts import ModelFacts
from tandem.observe.run import Run, evaluation_text
from tandem.prepare import Plan


def show_start(run: Run, workers: Workers, plan: Plan, done: int, *, own_advantage: bool = False) -> None:
    """A table of what is about to run."""
    config, facts = plan.config, workers.facts
    name = config.model.path or "new"
    rollout, algorithm, trainer = config.rollout, config.algorithm, config.trainer
    responses = config.data.prompts_per_step * rollout.n
    dropped = f", {plan.prompts.num_dropped} left out: too long" if plan.prompts.num_dropped else ""
    raw = ", texts as they stand (the model has a chat template: data.chat_template=always uses it)"
    table = {
        "model": f"{name}: {facts.architecture}, {_count(facts.num_parameters)} parameters, {config.model.dtype}",
        **_adapters(config, facts),
        "prompts": f"{len(plan.prompts):,}, at most {config.data.max_prompt_length} tokens each{dropped}"
        f"{raw if plan.prompts.has_raw_despite_template else ''}",
        "step": f"{config.data.prompts_per_step} prompts x {rollout.n} responses, "
        f"at most {rollout.max_response_length} tokens each, temperature {rollout.temperature:g}",
        **_rewards(config),
        "algorithm": _algorithm(algorithm, workers.loss, own_advantage=own_advantage),
        "update": f"{_updates(responses, trainer.mini_batch_responses, trainer.update_epochs)}, lr {trainer.lr:g} "
        f"{trainer.lr_schedule}",
        **_critic(config),
        "old log-probs": _OLD_LOGPROBS[algorithm.old_logprobs],
        "held out": ", ".join(
            f"{len(prompts):,} prompts{f' ({name})' if name else ''} x {config.evaluation.n}"
            for name, prompts in plan.held_out.items()
        )
        or "none",
        "device": _devices(config),
        **_layouts(config),
        "steps": f"{plan.num_steps}" + (f", going on after step {done}" if done else ""),
        "folder": str(run.folder),
    }
    run.console.start("Tandem", table)
    if done >= plan.num_steps:
        run.console.note(
            f"The run has reached step {done} already: nothing is left to train. "
            "run.steps=... goes on, run.folder=... starts anew."
        )


def show_end(run: Run) -> None:
    """What came of it, and what to do next."""
    metric = run.config.evaluation.metric
    best = run.best
    table: dict[str, str] = {}
    if best.before:
        table[f"{metric} before"] = evaluation_text(best.before, metric)
    if best.latest_step > 0:
        table[f"{metric} after"] = f"{evaluation_text(best.latest, metric)} (step {best.latest_step})"
    if best.step is not None:
        table["best"] = f"{best.value:.3f} at step {best.step}"
    table["run"] = str(run.folder)
    table["metrics"] = str(run.folder / "metrics.jsonl")
    table["responses"] = str(run.folder / "rollouts")
    title = {"stop": "Stopped", "patience": "No gain any more: stopped", None: "Finished"}[run.ended_by]
    again = ["the same command goes on from the last checkpoint"] if run.ended_by == "stop" else []
    tandem = _command()
    only_adapters = f"only the adapters, for peft: {tandem} export {run.folder} --to my-adapter --adapter"
    adapter = [only_adapters] if run.config.model.lora_rank > 0 else []
    next_steps = [
        *again,
        f"use the model: {tandem} export {run.folder} --to my-model",
        *adapter,
        "change anything: add options to the command, such as trainer.lr=1e-5 run.folder=runs/other",
        f"all options: {tandem} config",
    ]
    run.console.finish(title, table, next_steps)


_STD_OF = {"group": "the group", "batch": "the step"}
_OLD_LOGPROBS = {
    "update": "the update's own: every ratio is 1",
    "rollout": "kept while sampling",
    "recompute": "computed again by the trainer",
}


def _command() -> str:
    """How the command line is called here: environments are often used without being activated."""
    beside = Path(sys.executable).with_name("tandem")
    if shutil.which("tandem") is not None or not beside.exists():
        return "tandem"
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)


def _devices(config: Config) -> str:
    cluster = config.cluster
    each = " each" if cluster.num_workers > 1 else ""
    parts = [cluster.device, _plural(int(cluster.threads), "CPU thread") + each]
    if cluster.num_workers > 1:
        parts.insert(0, f"{cluster.num_workers} workers on {cluster.address or 'a Ray cluster of their own'}")
    if config.trainer.offload != "none":
        parts.append(f"training memory to {config.trainer.offload} between the phases")
    return ", ".join([*parts, *(["deterministic"] if cluster.deterministic else [])])


def _algorithm(algorithm: AlgorithmConfig, loss: Loss, *, own_advantage: bool) -> str:
    """Advantage and loss: what the config describes, or what was passed in its place."""
    std = "" if algorithm.normalize_std == "none" else f" / std of {_STD_OF[algorithm.normalize_std]}"
    advantage = "an advantage of your own" if own_advantage else algorithm.advantage + std
    parts = [advantage, "a loss of your own", loss.aggregation]
    if isinstance(loss, ClippedSurrogate):
        parts = [advantage, loss.surrogate, f"clip {loss.clip_low:g}/{loss.clip_high:g}", loss.aggregation]
    if algorithm.kl_in_reward:
        parts.append(f"KL {algorithm.kl_coef:g} by {algorithm.kl_estimator} in the reward")
    elif isinstance(loss, ClippedSurrogate):
        parts.append(f"KL {loss.kl_coef:g} by {loss.kl_estimator} in the loss" if loss.kl_coef > 0 else "no KL")
    return (f"{algorithm.preset}: " if algorithm.preset else "") + ", ".join(parts)


def _rewards(config: Config) -> dict[str, str]:
    """What becomes of rewards before advantages are made of them."""
    algorithm, reward, longest = config.algorithm, config.reward, config.rollout.max_response_length
    table: dict[str, str] = {}
    if algorithm.idle_groups == "resample":
        table["drawn again"] = f"groups without contrast, in at most {algorithm.max_resample} batches per step"
    if reward.overlong_buffer > 0:
        free = longest - reward.overlong_buffer
        table["long responses"] = f"beyond {free} tokens they pay, up to {reward.overlong_penalty:g} at {longest}"
    return table


def _critic(config: Config) -> dict[str, str]:
    """What is trained beside the policy."""
    critic = config.critic
    if not config.algorithm.has_critic:
        return {}
    clip = "no clip" if critic.clip_value is None else f"clip {critic.clip_value:g}"
    alone = f", alone for {_plural(critic.warmup_steps, 'step')}" if critic.warmup_steps else ""
    return {"critic": f"{critic.path or 'a copy of the policy'}, lr {critic.lr:g}, {clip}{alone}"}


def _adapters(config: Config, facts: ModelFacts) -> dict[str, str]:
    """What is trained beside weights that stay."""
    model = config.model
    if model.lora_rank == 0:
        return {}
    trained = _count(facts.num_adapter_parameters)
    return {"adapters": f"rank {model.lora_rank}, alpha {model.lora_alpha}: {trained} parameters are trained"}


def _layouts(config: Config) -> dict[str, str]:
    """How several workers share the weights in each phase."""
    workers, replicas, size = config.cluster.num_workers, config.trainer.replicas, config.rollout.tensor_parallel
    if workers == 1:
        return {}

    def copies(count: int) -> str:
        if count == workers:
            return "a copy in each worker"
        over = f"over {workers // count} workers"
        return f"one copy {over}" if count == 1 else f"{count} copies, each {over}"

    return {"weights": f"while training {copies(replicas)}; while sampling {copies(workers // size)}"}


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def _updates(responses: int, mini_batch: int | None, epochs: int) -> str:
    count = -(-responses // (mini_batch or responses)) * epochs
    return f"{_plural(count, 'update')} of {mini_batch or responses} responses"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
