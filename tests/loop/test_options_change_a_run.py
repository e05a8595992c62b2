"""Contract 8: two runs that differ in one option differ in what they log, option by option.

Options that change memory, speed or what lies in the folder are shown by tests of their own: see
tests/unit/test_every_option.py, which knows a test for every option there is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tandem as td
from tests.loop.small_run import MODEL, metrics_of, small_config
from tests.tiny import tiny_model_folder, write_jsonl

Settings = Mapping[str, Any]  # by dotted key
REWARDS = """
def score(response, ground_truth):
    return 1.0 if ground_truth in response else response.count("1") / 8

def ones(response, ground_truth):
    return float(response.count("1"))

def twos(response, ground_truth):
    return float(response.count("2"))

def rare(response, ground_truth):
    return float(response.startswith("1"))

def count(response, ground_truth, what="1"):
    return float(response.count(what))

def many(responses, ground_truth):
    return [float(response.count("1")) for response in responses]
"""
ROWS = [
    {
        "prompt": f"{left}+{right}=",
        "question": f"{right}={left}",
        "ground_truth": str(left + right),
        "truth": str(right),
        "data_source": "a" if left else "b",
        "kind": "c" if right else "d",
        "messages": [{"role": "user", "content": f"{left}+"}],
    }
    for left in range(3)
    for right in range(4)
]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ mark if mark is defined else '=' }}"


@dataclass(frozen=True)
class Case:
    """What is changed, and what both runs have in common beside the small run's own settings."""

    changed: Settings
    common: Settings = field(default_factory=dict)


EPOCHS: Settings = {"trainer.update_epochs": 3, "trainer.lr": 0.03}  # ratios leave the range
MINI: Settings = {"trainer.mini_batch_responses": 8}
KL: Settings = {"algorithm.kl_coef": 0.5, **EPOCHS}
TEMPLATED: Settings = {"data.chat_template": "{folder}/template.jinja", "data.prompt_key": "messages"}
EVALUATED: Settings = {"evaluation.data": "{folder}/rows.jsonl", "evaluation.every": 0}
WARM: Settings = {"sft.train": "{folder}/answers.jsonl", "sft.steps": 2, "sft.batch_size": 4, "sft.lr": 0.01}
BF16: Settings = {"model.dtype": "bfloat16"}
FALLING: Settings = {"trainer.lr_schedule": "linear", "trainer.lr_final": 0.1}
CUT: Settings = {"data.over_length": "left", "data.max_prompt_length": 3}
LORA: Settings = {"model.lora_rank": 2}
GAE: Settings = {"algorithm.advantage": "gae"}
RESAMPLE: Settings = {"algorithm.idle_groups": "resample", "reward.function": "{folder}/reward.py:rare"}
TWO: Settings = {"reward.function": ["{folder}/reward.py:ones", "{folder}/reward.py:twos"]}

CASES: dict[str, Case] = {
    "run.seed": Case({"run.seed": 1}),
    "run.steps": Case({"run.steps": 3}),
    "model.path": Case({"model.path": "{folder}/other", "model.new": None, "model.tokenizer": None}),
    "model.new": Case({"model.new": {**MODEL["new"], "hidden_size": 32}}),
    "model.tokenizer": Case({"model.tokenizer": {"characters": "=+9876543210"}}),
    "model.dtype": Case({"model.dtype": "bfloat16"}),
    "model.head_dtype": Case({"model.head_dtype": "bfloat16"}, {"model.dtype": "bfloat16"}),
    "model.lora_rank": Case({"model.lora_rank": 2}),
    "model.lora_alpha": Case({"model.lora_alpha": 2}, LORA),
    "model.lora_targets": Case({"model.lora_targets": ["q_proj", "up_proj"]}, LORA),
    "data.train": Case({"data.train": "{folder}/answers.jsonl"}),
    "data.epochs": Case({"data.epochs": 2}, {"run.steps": None, "data.max_rows": 4}),
    "data.prompts_per_step": Case({"data.prompts_per_step": 2}),
    "data.prompt_key": Case({"data.prompt_key": "question"}),
    "data.truth_key": Case({"data.truth_key": "truth"}),
    "data.source_key": Case({"data.source_key": "kind"}),
    "data.chat_template": Case({"data.chat_template": "{folder}/template.jinja"}),
    "data.chat_template_options": Case({"data.chat_template_options": {"mark": "1"}}, TEMPLATED),
    "data.system_prompt": Case({"data.system_prompt": "1+1"}, TEMPLATED),
    "data.max_prompt_length": Case({"data.max_prompt_length": 2}, CUT),
    "data.over_length": Case({"data.over_length": "right"}, CUT),
    "data.shuffle": Case({"data.shuffle": False}),
    "data.max_rows": Case({"data.max_rows": 4}),
    "sft.train": Case({"sft.train": "{folder}/other_answers.jsonl"}, WARM),
    "sft.steps": Case({"sft.steps": 3}, WARM),
    "sft.batch_size": Case({"sft.batch_size": 8}, WARM),
    "sft.lr": Case({"sft.lr": 0.02}, WARM),
    "rollout.n": Case({"rollout.n": 8}),
    "rollout.max_response_length": Case({"rollout.max_response_length": 6}),
    "rollout.temperature": Case({"rollout.temperature": 0.5}),
    "rollout.top_p": Case({"rollout.top_p": 0.5}),
    "rollout.top_k": Case({"rollout.top_k": 2}),
    "rollout.stop": Case({"rollout.stop": ["1"]}),
    "reward.function": Case({"reward.function": "{folder}/reward.py:twos"}),
    "reward.weights": Case({"reward.weights": {"ones": 3.0}}, TWO),
    "reward.options": Case({"reward.options": {"what": "2"}}, {"reward.function": "{folder}/reward.py:count"}),
    "reward.overlong_buffer": Case({"reward.overlong_buffer": 2}),
    "reward.overlong_penalty": Case({"reward.overlong_penalty": 3.0}, {"reward.overlong_buffer": 2}),
    "algorithm.advantage": Case({"algorithm.advantage": "rloo"}),
    "algorithm.gamma": Case({"algorithm.gamma": 0.5}, {"algorithm.advantage": "reinforce_plus_plus"}),
    "algorithm.lam": Case({"algorithm.lam": 0.5}, GAE),
    "algorithm.loss": Case({"algorithm.loss": "cispo"}, EPOCHS),
    "algorithm.max_resample": Case({"algorithm.max_resample": 2}, RESAMPLE),
    "algorithm.preset": Case({"algorithm.preset": "dr_grpo"}),
    "algorithm.normalize_std": Case({"algorithm.normalize_std": "group"}),
    "algorithm.loss_aggregation": Case({"algorithm.loss_aggregation": "sequence_sum"}),
    "algorithm.clip_low": Case({"algorithm.clip_low": 0.01}, EPOCHS),
    "algorithm.clip_high": Case({"algorithm.clip_high": 0.01}, EPOCHS),
    "algorithm.clip_dual": Case({"algorithm.clip_dual": 1.001}, EPOCHS),
    "algorithm.idle_groups": Case({"algorithm.idle_groups": "drop"}),
    "algorithm.mask_truncated": Case({"algorithm.mask_truncated": True}),
    "algorithm.correction": Case({"algorithm.correction": "none"}, BF16),
    "algorithm.correction_range": Case({"algorithm.correction_range": [0.0, 1.0]}, BF16),
    "algorithm.kl_coef": Case({"algorithm.kl_coef": 1.0}, KL),
    "algorithm.kl_estimator": Case({"algorithm.kl_estimator": "k2"}, KL),
    "algorithm.kl_place": Case({"algorithm.kl_place": "reward"}, KL),
    "critic.path": Case({"critic.path": "{folder}/other"}, GAE),
    "critic.lr": Case({"critic.lr": 0.01}, GAE),
    "critic.warmup_steps": Case({"critic.warmup_steps": 1}, GAE),
    "critic.clip_value": Case({"critic.clip_value": 1e-4}, {**GAE, **EPOCHS, "critic.lr": 0.01}),
    "algorithm.entropy_coef": Case({"algorithm.entropy_coef": 0.1}),
    "algorithm.reference": Case({"algorithm.reference": "{folder}/other"}, KL),
    "trainer.mini_batch_responses": Case(MINI),
    "trainer.mini_batch_shuffle": Case({"trainer.mini_batch_shuffle": "responses"}, MINI),
    "trainer.update_epochs": Case({"trainer.update_epochs": 2}),
    "trainer.lr": Case({"trainer.lr": 0.02}),
    "trainer.lr_schedule": Case({"trainer.lr_schedule": "cosine"}),
    "trainer.lr_final": Case({"trainer.lr_final": 0.5}, FALLING),
    "trainer.warmup_steps": Case({"trainer.warmup_steps": 5}),
    "trainer.weight_decay": Case({"trainer.weight_decay": 1.0}),
    "trainer.betas": Case({"trainer.betas": [0.5, 0.6]}, EPOCHS),
    "trainer.max_grad_norm": Case({"trainer.max_grad_norm": 1e-7}),
    "evaluation.data": Case({"evaluation.data": "{folder}/answers.jsonl"}, EVALUATED),
    "evaluation.every": Case({"evaluation.every": 1}, EVALUATED),
    "evaluation.n": Case({"evaluation.n": 3}, EVALUATED),
    "evaluation.temperature": Case({"evaluation.temperature": 0.0}, EVALUATED),
}


class Runs:
    """Runs each setting once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "template.jinja").write_text(TEMPLATE)
        write_jsonl(folder / "rows.jsonl", ROWS)
        answers = [
            {"prompt": f"{number}=", "response": str(number), "ground_truth": str(number)} for number in range(8)
        ]
        write_jsonl(folder / "answers.jsonl", answers)
        write_jsonl(folder / "other_answers.jsonl", [{**answer, "response": "7"} for answer in answers])
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
        tiny_model_folder(folder / "other", characters="0123456789+=", overrides=small)
        self.metrics = functools.cache(self._metrics)

    def of(self, settings: Settings) -> list[dict[str, Any]]:
        return self.metrics(json.dumps(dict(settings), sort_keys=True))

    def _metrics(self, settings: str) -> list[dict[str, Any]]:
        sections: dict[str, dict[str, Any]] = {"run": {"steps": 2}, "checkpoint": {"every": 0}}
        for key, value in json.loads(settings.replace("{folder}", str(self.folder))).items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        sections["run"]["folder"] = str(self.folder / f"run_{self.metrics.cache_info().misses}")
        sections["data"] = {"train": str(self.folder / "rows.jsonl"), **sections.get("data", {})}
        config = small_config(self.folder, {"tracking": {"rollouts_every": 0}, **sections})
        (self.folder / "reward.py").write_text(REWARDS)
        return metrics_of(td.train(td.config_from_dict(config)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("options"))


@pytest.mark.parametrize("key", CASES)
def test_the_option_changes_the_run(runs: Runs, key: str) -> None:
    case = CASES[key]
    assert key in case.changed
    assert runs.of(case.common) != runs.of({**case.common, **case.changed})


def test_what_only_spreads_the_work_changes_nothing(runs: Runs) -> None:
    """The comparison above is none that is always true."""
    assert runs.of({}) == runs.of({"reward.workers": 2, "checkpoint.background": False, "tracking.rollouts_max": 1})
