"""Whole runs of PPO with a critic: what they learn, the critic's warm-up, and going on to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tandem as td
from tandem.errors import CheckpointError, ConfigError, ModelError
from tests.loop.small_run import differences, metrics_of, run_command, small_config, start_command, traces_of
from tests.loop.small_run import write_config as written
from tests.loop.test_going_on import run_to
from tests.loop.test_resume import kill_when, num_lines

WARM_UP, STEPS = 3, 16
PPO: dict[str, dict[str, Any]] = {
    "run": {"steps": STEPS},
    "rollout": {"n": 4, "max_response_length": 4},
    "algorithm": {"advantage": "gae", "lam": 0.95, "kl_coef": 0.01, "kl_place": "reward"},
    "critic": {"lr": 1e-2, "warmup_steps": WARM_UP},
    "trainer": {"lr": 1e-2, "warmup_steps": 0, "mini_batch_responses": 8, "update_epochs": 2},
    "checkpoint": {"every": 2, "keep": 2},
}


def ppo_run(folder: Path) -> Path:
    """Its YAML file, in a folder that is made."""
    folder.mkdir()
    return written(folder / "run.yaml", small_config(folder, PPO))


def test_fault_38_ppo_learns_and_killed_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Killed in the warm-up, in a save, and after a step."""
    log = tmp_path / "log"
    whole = ppo_run(tmp_path / "whole")
    assert run_command(["train", str(whole)], log) == 0, log.read_text()
    assert "critic: a copy of the policy, lr 0.01, clip 0.5, alone for 3 steps\n" in log.read_text()
    lines = metrics_of(whole.parent / "run")
    for line in lines:
        in_warm_up = line["step"] <= WARM_UP
        assert (line["policy/loss"] is None) == (line["policy/grad_norm"] is None) == in_warm_up
        assert line["critic/loss"] > 0
    values = [line["critic/value_mean"] for line in lines]
    assert values[0] == 0
    assert sum(line["reward/mean"] for line in lines[-4:]) > 1.5 * sum(line["reward/mean"] for line in lines[:4])
    assert abs(values[-1] - lines[-1]["reward/mean"]) < 0.5 * lines[-1]["reward/mean"]

    killed = ppo_run(tmp_path / "killed")
    run = killed.parent / "run"
    saving = run / "checkpoints"
    for moment in (
        lambda: num_lines(run) >= WARM_UP,
        lambda: num_lines(run) > WARM_UP + 1 and any(saving.glob("*.partial/critic")),
        lambda: num_lines(run) >= STEPS - 1,
    ):
        process = start_command(["train", str(killed)], log)
        assert kill_when(process, moment), log.read_text()[-3000:]
    assert run_command(["train", str(killed)], log) == 0, log.read_text()[-3000:]
    assert differences(traces_of(run), traces_of(whole.parent / "run")) == []
    assert any((run / "checkpoints").glob("*/critic/optimizer"))


def test_a_critic_that_is_nowhere_is_told_before_anything_begins(tmp_path: Path) -> None:
    critic = {"critic": {**PPO["critic"], "path": str(tmp_path / "nowhere")}}
    config = td.config_from_dict(small_config(tmp_path, {**PPO, **critic}))
    with pytest.raises(ModelError, match=r"critic\.path: .* does not exist"):
        td.train(config)
    assert not (tmp_path / "run").exists()


def going_on(**critic: Any) -> Mapping[str, Mapping[str, Any]]:
    """A run of another kind goes on with a critic."""
    return {"run": {"allow_changes": True}, "algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-2, **critic}}


def test_a_critic_that_comes_later_learns_alone_first(tmp_path: Path) -> None:
    run = run_to(tmp_path, 2)
    run_to(tmp_path, 3, going_on(warmup_steps=2))
    run_to(tmp_path, 5, going_on(warmup_steps=2))
    assert [line["policy/loss"] is None for line in metrics_of(run)] == [False, False, True, True, False]


def test_a_critic_that_comes_later_from_nowhere_is_told_before_anything_changes(tmp_path: Path) -> None:
    run = run_to(tmp_path, 1)
    recorded = (run / "config.yaml").read_text()
    with pytest.raises(ModelError, match=r"critic\.path: .* does not exist"):
        run_to(tmp_path, 2, going_on(path=str(tmp_path / "nowhere")))
    assert (run / "config.yaml").read_text() == recorded


def test_another_critic_path_is_refused_where_the_run_has_a_critic(tmp_path: Path) -> None:
    run = run_to(tmp_path, 1, going_on())
    recorded = (run / "config.yaml").read_text()
    with pytest.raises(
        CheckpointError, match=r"as it began, in this:\n  critic\.path: null -> .*nowhere\n  -> set it as it was"
    ):
        run_to(tmp_path, 2, going_on(path=str(tmp_path / "nowhere")))
    assert (run / "config.yaml").read_text() == recorded


def test_a_warm_up_as_long_as_the_epochs_is_refused_before_anything_begins(tmp_path: Path) -> None:
    changes = {**PPO, "run": {"steps": None}, "critic": {"warmup_steps": 3}}
    config = small_config(tmp_path, {**changes, "data": {"epochs": 1}})
    with pytest.raises(ConfigError, match=r"critic\.warmup_steps: is 3, so within the 3 steps of this run the policy"):
        td.train(td.config_from_dict(config))
    assert not (tmp_path / "run").exists()
    config["critic"]["warmup_steps"] = 2
    lines = metrics_of(td.train(td.config_from_dict(config)))
    assert [line["policy/loss"] is None for line in lines] == [True, True, False]
