from __future__ import annotations

import pytest

from tandem.config import Config, difference, load_config

ENOUGH = ("model.path=Qwen/Qwen3-0.6B", "data.train=train.parquet", "reward.function=exact_match")


def test_equal_configs_do_not_differ():
    config = load_config(None, ENOUGH)
    assert not difference(config, load_config(None, [*ENOUGH, "rollout.n=8"]))


@pytest.mark.parametrize(
    "override",
    [
        "run.folder=elsewhere",
        "run.steps=100",
        "run.allow_changes=true",
        "checkpoint.every=1",
        "evaluation.data=x.parquet",
        "tracking.to=[wandb]",
        "cluster.threads=1",
        "cluster.num_workers=2",
        "trainer.offload=disk",
    ],
)
def test_what_does_not_change_what_is_learned_may_change_freely(override: str):
    found = difference(load_config(None, ENOUGH), load_config(None, [*ENOUGH, override]))
    assert [change.key for change in found.free] == [override.partition("=")[0]]
    assert found.guarded == ()


def test_a_run_may_go_on_in_another_layout():
    keys = ["cluster.num_workers", "cluster.address", "rollout.tensor_parallel", "trainer.replicas"]
    overrides = ["cluster.num_workers=4", "cluster.address=auto", "rollout.tensor_parallel=2", "trainer.replicas=2"]
    found = difference(load_config(None, ENOUGH), load_config(None, [*ENOUGH, *overrides]))
    assert {change.key for change in found.free} == set(keys)
    assert found.guarded == ()


def test_where_a_critic_begins_can_be_said_once():
    def with_critic(*overrides: str) -> Config:
        return load_config(None, [*ENOUGH, "algorithm.advantage=gae", *overrides])

    other = with_critic("critic.path=reward_model", "critic.lr=1e-4")
    found = difference(with_critic(), other)
    assert [change.key for change in found.fixed] == ["critic.path"]
    assert [change.key for change in found.guarded] == ["critic.lr"]
    begun_without = difference(load_config(None, ENOUGH), other)
    assert begun_without.fixed == ()
    assert "critic.path" in [change.key for change in begun_without.guarded]


@pytest.mark.parametrize("change", ["model.lora_rank=8", "model.lora_alpha=8", "model.lora_targets=[q_proj]"])
def test_what_adapters_are_never_changes(change: str):
    began = [*ENOUGH, "model.lora_rank=16"]
    found = difference(load_config(None, began), load_config(None, [*began, change, "run.allow_changes=true"]))
    assert [change.key for change in found.fixed] == [change.partition("=")[0]]
    assert found.guarded == ()


def test_other_changes_are_guarded_and_shown_with_both_values():
    old = load_config(None, ENOUGH)
    new = load_config(None, [*ENOUGH, "run.seed=1", "rollout.stop=[END]", "trainer.lr=1e-5", "checkpoint.keep=3"])
    found = difference(old, new)
    assert [str(change) for change in found.guarded] == [
        "run.seed: 0 -> 1",
        "rollout.stop: [] -> [END]",
        "trainer.lr: 1e-6 -> 1e-5",
    ]
    assert [str(change) for change in found.free] == ["checkpoint.keep: 2 -> 3"]
