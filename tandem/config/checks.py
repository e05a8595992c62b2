"""Settings that contradict each other, and settings that are missing. No file is opened and no model is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.config.conflict import Conflict
from tandem.config.display import show
from tandem.config.evaluation import EvaluationConfig
from tandem.config.schema import Config, value_of

_PASS_AT_K = re.compile(r"(?:(?P<name>.+)/)?pass@(?P<k>[1-9][0-9]*)\Z")

_LEAST_VLLM_TEMPERATURE = 0.01  # it raises lower ones but 0 to this

# Advantages that compare responses to the same prompt: equal rewards teach nothing there, and nor does a single one.
_WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
_WITHOUT_GROUPS = "reinforce_plus_plus, remax and gae"


def contradictions(config: Config) -> list[Conflict]:
    """All settings that contradict each other, or that no run can follow."""
    checks = [_model, _data, _sft, _engine, _old_logprobs, _correction, _reward, _workers, _offload, _evaluation]
    checks += [_not_finite, _long_responses, _advantage, _idle_groups, _critic]
    if config.data.train is not None:  # else a loop of the user's own says how many responses a step has
        checks += [_rollout, _mini_batches]
    return [conflict for check in checks for conflict in check(config)]


def missing(config: Config, *, need_data: bool, need_reward: bool) -> list[Conflict]:
    """What a run cannot do without: a model always, prompts and a reward function where they are needed."""
    found = []
    if config.model.path is None and config.model.new is None:
        remedy = "give a folder or hub name (model.path=Qwen/Qwen3-0.6B), or model.new to build a small model"
        found.append(Conflict(("model.path", "model.new"), "is missing: there is no model to train", remedy))
    if need_data and config.data.train is None:
        remedy = "give a parquet or jsonl file, a hub name or a generator (file.py:name)"
        found.append(Conflict(("data.train",), "is missing: there are no prompts to train on", remedy))
    if need_reward and config.reward.function is None:
        remedy = "name your function (reward.function=my_reward.py:compute_score) or a built-in one"
        found.append(Conflict(("reward.function",), "is missing: nothing scores the responses", remedy))
    return found


def responses_per_step(config: Config) -> int:
    """Responses of one step: prompts times group size."""
    return config.data.prompts_per_step * config.rollout.n


def updates_per_step(config: Config) -> int:
    """Optimizer updates of one step: mini-batches times passes."""
    responses = responses_per_step(config)
    mini_batch = config.trainer.mini_batch_responses or responses
    return config.trainer.update_epochs * -(-responses // mini_batch)


def _model(config: Config) -> Iterator[Conflict]:
    model = config.model
    if model.path is not None and model.new is not None:
        yield Conflict(
            ("model.new", "model.path"), "is given, and model.path too", "keep one: load a model, or build one"
        )
    if model.new is None:
        return
    if not isinstance(model.new.get("architecture"), str):
        remedy = "model.new={architecture: Qwen3ForCausalLM, hidden_size: 64, num_hidden_layers: 2, ...}"
        yield Conflict(("model.new",), "names no architecture", remedy)
    if model.tokenizer is None:
        remedy = 'name a folder or the hub, or build one: model.tokenizer={characters: "0123456789+= "}'
        yield Conflict(("model.tokenizer", "model.new"), "is missing: a new model brings no tokenizer", remedy)


def _data(config: Config) -> Iterator[Conflict]:
    data = config.data
    sources = data.train if isinstance(data.train, tuple) else ()
    paths = [source.path for source in sources] or ([data.train] if isinstance(data.train, str) else [])
    for key, path in [*(("data.train", path) for path in paths), ("sft.train", config.sft.train)]:
        if path is not None and path.endswith(".py"):
            remedy = f"name the function that makes the rows: {path}:rows"
            yield Conflict((key,), f"{path} is Python code without the name of a function", remedy)
    if data.chat_template not in ("auto", "always", "never") and not data.chat_template.endswith((".jinja", ".jinja2")):
        message = f"got {show(data.chat_template)}, expected auto, always, never or the path of a .jinja file"
        yield Conflict(("data.chat_template",), message, "auto fits most data")
    if data.chat_template == "never" and data.system_prompt is not None:
        message = "a system prompt needs a chat template, and data.chat_template is never"
        yield Conflict(
            ("data.system_prompt", "data.chat_template"), message, "set data.chat_template=always, or leave it out"
        )


def _sft(config: Config) -> Iterator[Conflict]:
    if config.sft.train is not None and config.sft.steps == 0:
        remedy = "set sft.steps to the number of updates, or leave sft.train out"
        yield Conflict(("sft.steps", "sft.train"), "is 0, although sft.train is given", remedy)
    if config.sft.train is None and config.sft.steps > 0:
        message = f"is missing, although sft.steps is {config.sft.steps}"
        yield Conflict(("sft.train", "sft.steps"), message, "give a file of prompts with answers, or set sft.steps=0")


def _rollout(config: Config) -> Iterator[Conflict]:
    key, advantage = "algorithm.advantage", config.algorithm.advantage
    if config.rollout.n == 1 and advantage in _WITHIN_GROUPS:
        message = f"is 1: a group of one has nothing to compare with, so with {key}={advantage} it would teach nothing"
        remedy = f"set it to 2 or more; 8 is usual. {_WITHOUT_GROUPS} need no group ({key})"
        yield Conflict(("rollout.n", key), message, remedy)


def _advantage(config: Config) -> Iterator[Conflict]:
    algorithm = config.algorithm
    if algorithm.kl_in_reward and algorithm.old_logprobs == "update":
        keys = ("algorithm.old_logprobs", "algorithm.kl_place", "algorithm.kl_coef")
        message = f"is update, but with {keys[1]}=reward they are needed before the update, for the advantages"
        yield Conflict(keys, message, f"set {keys[0]}=auto or recompute, or {keys[1]}=loss")


def _idle_groups(config: Config) -> Iterator[Conflict]:
    algorithm = config.algorithm
    key, by_advantage, by_kl = "algorithm.idle_groups", "algorithm.advantage", "algorithm.kl_place"
    if algorithm.idle_groups == "keep":
        return
    teach = "groups of equal rewards teach something, too"
    if algorithm.advantage not in _WITHIN_GROUPS:
        message = f"is {algorithm.idle_groups}, but with {by_advantage}={algorithm.advantage} {teach}"
        remedy = f"set {key}=keep, or {by_advantage} to one of {', '.join(_WITHIN_GROUPS)}"
        yield Conflict((key, by_advantage), message, remedy)
    if algorithm.kl_in_reward:
        message = f"is {algorithm.idle_groups}, but with {by_kl}=reward {teach}: each response has its own KL penalty"
        yield Conflict((key, by_kl, "algorithm.kl_coef"), message, f"set {key}=keep, or {by_kl}=loss")
    if algorithm.idle_groups == "resample" and algorithm.max_resample == 1:
        max_key = "algorithm.max_resample"
        message = f"is 1, the batch that each step begins with: {key}=resample would draw nothing in its place"
        yield Conflict((max_key, key), message, f"set it to 2 or more, or {key}=keep")


def _long_responses(config: Config) -> Iterator[Conflict]:
    keys = ("reward.overlong_buffer", "rollout.max_response_length")
    buffer, limit = config.reward.overlong_buffer, config.rollout.max_response_length
    if buffer >= limit:
        message = f"is {buffer}, so with {keys[1]}={limit} every response would be too long"
        usual = f"; DAPO takes a fifth of the length, {limit // 5}" if limit >= 5 else " (0 = off)"
        yield Conflict(keys, message, f"set it below {limit}{usual}")


def _critic(config: Config) -> Iterator[Conflict]:
    keys, steps = ("critic.warmup_steps", "run.steps"), config.run.steps
    if config.algorithm.has_critic and steps is not None and config.critic.warmup_steps >= steps > 0:
        message = f"is {config.critic.warmup_steps}, so within {keys[1]}={steps} the policy would never be updated"
        yield Conflict(keys, message, f"set it below {steps}, or more steps")


def _engine(config: Config) -> Iterator[Conflict]:
    if config.rollout.engine == "embedded" and config.rollout.vllm_options:
        message = "has no effect: rollout.engine is embedded"
        yield Conflict(("rollout.vllm_options", "rollout.engine"), message, "set rollout.engine=vllm, or leave it out")
    if config.rollout.engine == "vllm":
        for key in ("rollout.temperature", "evaluation.temperature"):
            temperature = value_of(config, key)
            if temperature is not None and 0 < temperature < _LEAST_VLLM_TEMPERATURE:
                message = f"is {show(temperature)}, but vLLM samples at {_LEAST_VLLM_TEMPERATURE} or above"
                remedy = f"set {key}={_LEAST_VLLM_TEMPERATURE} or more, or rollout.engine=embedded"
                yield Conflict((key, "rollout.engine"), message, remedy)


def _not_finite(config: Config) -> Iterator[Conflict]:
    for key in ("reward.options", "data.chat_template_options", "model.new", "rollout.vllm_options"):
        if _has_not_finite(value_of(config, key)):
            message = "holds .inf or .nan, and the run's own config could not keep it"
            yield Conflict((key,), message, "write a number, or the text '.inf' or '.nan' in quotes")


def _has_not_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_not_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_not_finite, value))
    return isinstance(value, float) and not math.isfinite(value)


def _mini_batches(config: Config) -> Iterator[Conflict]:
    mini_batch, responses = config.trainer.mini_batch_responses, responses_per_step(config)
    if mini_batch is None or responses % mini_batch == 0:
        return
    keys = ("trainer.mini_batch_responses", "data.prompts_per_step", "rollout.n")
    step = f"a step's {responses} responses ({config.data.prompts_per_step} prompts x {config.rollout.n})"
    if mini_batch > responses:
        yield Conflict(keys, f"is {mini_batch}, more than {step}", f"set it to {responses} at most, or null for all")
        return
    divisors = [size for size in range(1, responses + 1) if responses % size == 0]
    below = max(size for size in divisors if size < mini_batch)
    above = min(size for size in divisors if size > mini_batch)
    yield Conflict(
        keys, f"is {mini_batch}, which does not divide {step}", f"the nearest that do are {below} and {above}"
    )


def _old_logprobs(config: Config) -> Iterator[Conflict]:
    key, choice = "algorithm.old_logprobs", config.algorithm.old_logprobs
    remedy = f"set {key}=recompute, or auto"
    updates = updates_per_step(config)
    if choice == "update" and updates > 1 and config.data.train is not None:
        message = f"is update, which needs one update per step, but a step has {updates}"
        keys = (key, "trainer.update_epochs", "trainer.mini_batch_responses", "data.prompts_per_step", "rollout.n")
        yield Conflict(keys, message, remedy)
    if choice in ("update", "rollout"):
        filters = (("rollout.top_p", config.rollout.top_p, 1.0), ("rollout.top_k", config.rollout.top_k, None))
        for filter_key, value, off in filters:
            if value != off:
                message = f"is {choice}, but with {filter_key}={show(value)} the old log-probs must be recomputed"
                yield Conflict((key, filter_key), message, f"{remedy}; or {filter_key}={show(off)} for no filter")
    for dtype_key, dtype in (("model.dtype", config.model.dtype), ("model.head_dtype", config.model.head_dtype)):
        if choice == "rollout" and dtype == "bfloat16":
            message = f"is rollout, but in bfloat16 ({dtype_key}) log-probs of sampling and of training differ too much"
            yield Conflict((key, dtype_key), message, f"{remedy}; or {dtype_key}=float32")


def _correction(config: Config) -> Iterator[Conflict]:
    key, choice = "algorithm.correction", config.algorithm.correction
    low, high = config.algorithm.correction_range
    range_key, shown = "algorithm.correction_range", show(config.algorithm.correction_range)
    if low == high:
        yield Conflict((range_key,), f"is {shown}: no ratio but 1 is inside", "[0.5, 2.0] is usual for masks")
    if choice in ("token_tis", "sequence_tis") and low > 0:
        message = f"is {shown}, but with {key}={choice} ratios are cut above only"
        remedy = f"set {range_key}=[0.0, {show(high)}], or {key}={choice.replace('tis', 'mask')} for both sides"
        yield Conflict((range_key, key), message, remedy)
    if choice not in ("auto", "none") and config.algorithm.old_logprobs == "rollout":
        old_key = "algorithm.old_logprobs"
        message = f"is {choice}, but with {old_key}=rollout there are no log-probs of the trainer's to compare with"
        yield Conflict((key, old_key), message, f"set {old_key}=auto or recompute, or {key}=none")
    yield from _cut_logprobs(config)


def _cut_logprobs(config: Config) -> Iterator[Conflict]:
    algorithm, rollout = config.algorithm, config.rollout
    if not rollout.has_cut_logprobs:
        return
    cuts = (("rollout.top_p", rollout.top_p, 1.0), ("rollout.top_k", rollout.top_k, None))
    cut_keys = [key for key, value, off in cuts if value != off]
    compared = (
        ("algorithm.correction", algorithm.correction, "none"),
        ("algorithm.mismatch_stop", algorithm.mismatch_stop, None),
    )
    for key, value, off in compared:
        if value not in (off, "auto"):
            message = f"is {show(value)}, but with {' and '.join(cut_keys)} vLLM's log-probs are of a cut distribution"
            remedy = f"set {key}={show(off)}, or rollout.engine=embedded, or leave out {' and '.join(cut_keys)}"
            yield Conflict((key, "rollout.engine", *cut_keys), message, remedy)


def _short_name(function: str, functions: Sequence[str]) -> str:
    """What follows the colon of file.py:name, unless two functions share it."""
    short = function.rpartition(":")[2]
    is_shared = sum(other.rpartition(":")[2] == short for other in functions) > 1
    return function if is_shared else short


def _reward(config: Config) -> Iterator[Conflict]:
    function = config.reward.function
    if function is None:
        return
    functions = (
        [function] if isinstance(function, str) else list(function.values() if isinstance(function, dict) else function)
    )
    for name in functions:
        path, colon, attribute = name.rpartition(":")
        if name.endswith(".py") or (colon and not (path and attribute)):
            remedy = f"name the function in it: {name.rstrip(':')}:compute_score"
            yield Conflict(("reward.function",), f"{name} is a file without the name of a function", remedy)
    if not isinstance(function, tuple):
        return
    twice = sorted({name for name in function if function.count(name) > 1})
    if twice:
        yield Conflict(("reward.function",), f"names {', '.join(twice)} twice", "use reward.weights")
    names = [_short_name(name, function) for name in function]
    unknown = [name for name in config.reward.weights if name not in (*names, *function)]
    if unknown:
        message = f"weighs {', '.join(unknown)}, which is not in reward.function"
        yield Conflict(("reward.weights", "reward.function"), message, f"the names are {', '.join(names)}")


def _workers(config: Config) -> Iterator[Conflict]:
    workers = config.cluster.num_workers
    counts = (
        ("rollout.tensor_parallel", config.rollout.tensor_parallel),
        ("trainer.replicas", config.trainer.replicas),
    )
    for key, count in counts:
        if workers > 1 and workers % count:  # a single worker has nothing to divide: see effects
            divisors = [str(size) for size in range(1, workers + 1) if workers % size == 0]
            valid = f"{', '.join(divisors[:-1])} or {divisors[-1]}"
            message = f"is {count}, which does not divide cluster.num_workers={workers}"
            remedy = f"set it to {valid}, or cluster.num_workers to a multiple of {count}"
            yield Conflict((key, "cluster.num_workers"), message, remedy)


def _offload(config: Config) -> Iterator[Conflict]:
    if config.trainer.offload == "host" and config.cluster.device == "cpu":
        message = "is host, but on a CPU the host's memory is where everything is already"
        remedy = "set trainer.offload=disk to free memory while the policy samples, or none"
        yield Conflict(("trainer.offload", "cluster.device"), message, remedy)


def _evaluation(config: Config) -> Iterator[Conflict]:
    evaluation = config.evaluation
    yield from _metric(evaluation)
    if evaluation.temperature == 0 and evaluation.n > 1:
        message = f"is {evaluation.n}, but at evaluation.temperature=0 all responses to a prompt are the same"
        remedy = "set evaluation.n=1, or a temperature above 0"
        yield Conflict(("evaluation.n", "evaluation.temperature"), message, remedy)


def _metric(evaluation: EvaluationConfig) -> Iterator[Conflict]:
    match = _PASS_AT_K.match(evaluation.metric)
    if match is None:
        message = f"got {show(evaluation.metric)}, expected pass@k or name/pass@k, with a number for k"
        yield Conflict(("evaluation.metric",), message, "pass@1 is the mean accuracy")
        return
    if int(match["k"]) not in evaluation.ks:
        known = ", ".join(f"pass@{k}" for k in evaluation.ks)
        message = f"is {evaluation.metric}, but with evaluation.n={evaluation.n} what is estimated is {known}"
        yield Conflict(
            ("evaluation.metric", "evaluation.n"), message, f"take one of these, or set evaluation.n={match['k']}"
        )
    name, sets = match["name"], evaluation.data
    if name and isinstance(sets, dict) and not any(f"{name}/".startswith(f"{known}/") for known in sets):
        message = f"is {evaluation.metric}, but evaluation.data has no set {name}"
        yield Conflict(("evaluation.metric", "evaluation.data"), message, f"the sets are {', '.join(sets)}")
