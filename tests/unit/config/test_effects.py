from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config import load_config, to_yaml
from tandem.errors import ConfigError

ENOUGH = ("model.path=Qwen/Qwen3-0.6B", "data.train=train.parquet", "reward.function=exact_match")


@pytest.mark.parametrize(
    ("overrides", "cure"),
    [
        (["algorithm.kl_estimator=k1"], ["algorithm.kl_coef=0.1"]),
        (["algorithm.reference=folder"], ["algorithm.kl_coef=0.1"]),
        (["algorithm.kl_place=reward"], ["algorithm.kl_coef=0.1"]),
        (["algorithm.normalize_std=group", "algorithm.advantage=rloo"], ["algorithm.advantage=grpo"]),
        (["algorithm.normalize_std=batch", "algorithm.advantage=dr_grpo"], ["algorithm.advantage=grpo"]),
        (["algorithm.gamma=0.9"], ["algorithm.advantage=gae"]),
        (["algorithm.gamma=0.9"], ["algorithm.advantage=reinforce_plus_plus"]),
        (["algorithm.lam=0.9"], ["algorithm.advantage=gae"]),
        (["algorithm.lam=0.9", "algorithm.advantage=reinforce_plus_plus"], ["algorithm.advantage=gae"]),
        (["critic.path=folder"], ["algorithm.advantage=gae"]),
        (["critic.lr=1e-4"], ["algorithm.advantage=gae"]),
        (["critic.warmup_steps=1"], ["algorithm.advantage=gae"]),
        (["critic.clip_value=null"], ["algorithm.advantage=gae"]),
        (["algorithm.clip_dual=3.0", "algorithm.loss=gspo"], ["algorithm.loss=ppo_clip"]),
        (["algorithm.clip_dual=3.0", "algorithm.loss=cispo"], ["algorithm.loss=ppo_clip"]),
        (["algorithm.max_resample=2"], ["algorithm.idle_groups=resample"]),
        (["reward.overlong_penalty=0.5"], ["reward.overlong_buffer=8"]),
        (["model.lora_alpha=16"], ["model.lora_rank=8"]),
        (["model.lora_targets=[q_proj]"], ["model.lora_rank=8"]),
        (["trainer.lr_final=0.1"], ["trainer.lr_schedule=linear"]),
        (["reward.weights={exact_match: 2}"], ["reward.function=[exact_match, format]"]),
        (["data.epochs=2", "run.steps=10"], ["run.steps=null"]),
        (["data.chat_template_options={x: 1}", "data.chat_template=never"], ["data.chat_template=auto"]),
        (["sft.lr=1e-3"], ["sft.train=x", "sft.steps=1"]),
        (["evaluation.every=5"], ["evaluation.data=x"]),
        (["evaluation.temperature=0.6"], ["evaluation.data=x"]),
        (["checkpoint.keep_best=2"], ["evaluation.data=x"]),
        (["evaluation.patience=3", "evaluation.data=x", "evaluation.every=0"], ["evaluation.every=1"]),
        (["cluster.address=10.0.0.1:6379"], ["cluster.num_workers=2"]),
        (["cluster.max_failures=0"], ["cluster.num_workers=2"]),
        (["rollout.tensor_parallel=2"], ["cluster.num_workers=2"]),
        (["trainer.replicas=2"], ["cluster.num_workers=4"]),
        (["tracking.project=sums", "tracking.to=[tensorboard]"], ["tracking.to=[wandb]"]),
        (["tracking.rollouts_max=8", "tracking.rollouts_every=0"], ["tracking.rollouts_every=1"]),
    ],
)
def test_fault_44_a_key_without_effect_is_refused_until_something_gives_it_one(overrides: list[str], cure: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*ENOUGH, *overrides])
    (problem,) = caught.value.problems
    assert problem.key == overrides[0].partition("=")[0]
    assert "has no effect" in problem.message
    load_config(None, [*ENOUGH, *overrides, *cure])


def test_keys_without_effect_for_the_same_reason_are_one_problem():
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*ENOUGH, "evaluation.n=4", "evaluation.patience=2"])
    (problem,) = caught.value.problems
    assert str(problem) == (
        "command line: evaluation.n: has no effect (nor has evaluation.patience): there is nothing to evaluate on\n"
        "      -> give evaluation.data, or leave them out"
    )


def test_a_value_that_is_the_default_anyway_is_no_problem():
    load_config(None, [*ENOUGH, "algorithm.kl_estimator=k3", "evaluation.every=10", "trainer.lr_final=0"])


def test_what_the_command_line_switches_off_takes_the_files_settings_along(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("evaluation: {data: held.jsonl, every: 5, n: 4}\ntrainer: {lr_schedule: linear, lr_final: 0.1}\n")
    config = load_config(path, [*ENOUGH, "evaluation.data=null", "trainer.lr_schedule=constant"])
    assert (config.evaluation.data, config.evaluation.every, config.trainer.lr_final) == (None, 10, 0.0)
    path.write_text(to_yaml(config))
    assert load_config(path) == config
    overrides = ["evaluation.temperature=0.5", "evaluation.n=2", "evaluation.patience=1"]
    with pytest.raises(ConfigError, match=r"evaluation\.n: has no effect \(nor have evaluation\.temperature, eval"):
        load_config(path, [*ENOUGH, "evaluation.data=null", *overrides])


def test_one_worker_on_the_command_line_takes_the_files_cluster_along(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "cluster: {num_workers: 8, address: auto, max_failures: 1}\nrollout: {tensor_parallel: 2}\n"
        "trainer: {replicas: 2}\n"
    )
    config = load_config(path, [*ENOUGH, "cluster.num_workers=1"])
    assert (config.cluster.num_workers, config.cluster.address, config.cluster.max_failures) == (1, None, 3)
    assert (config.rollout.tensor_parallel, config.trainer.replicas) == (1, 1)


def test_another_advantage_on_the_command_line_takes_the_files_critic_along(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {advantage: gae, lam: 0.95}\ncritic: {lr: 1.0e-4, warmup_steps: 2}\n")
    config = load_config(path, [*ENOUGH, "algorithm.advantage=rloo"])
    assert (config.algorithm.lam, config.critic.lr, config.critic.warmup_steps) == (1.0, 1e-5, 0)


def test_a_file_that_switches_off_what_it_sets_is_refused(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("evaluation:\n  data:\n  every: 5\n")
    with pytest.raises(ConfigError, match=r"evaluation\.every: has no effect: "):
        load_config(path, [*ENOUGH, "evaluation={n: 1}"])
