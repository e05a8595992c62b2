from __future__ import annotations

import math

import pytest

from tandem.batch import Evaluation, Rollouts
from tandem.observe.metrics import METRICS
from tandem.observe.step_metrics import groups_without_contrast, num_tokens, step_metrics
from tests.unit.observe.made import made_rewards, made_rollouts, made_update


def test_the_numbers_of_a_step() -> None:
    rollouts = made_rollouts(((3, 1), (2, 2)))
    metrics = step_metrics(rollouts, made_rewards((1.0, 0.0, 1.0, 1.0)), made_update())
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std"] == 0.5
    assert metrics["reward/invalid"] == 0
    assert metrics["rollout/groups_without_contrast"] == 1
    assert metrics["rollout/response_length_mean"] == 2.0
    assert metrics["rollout/response_length_max"] == 3.0
    assert metrics["rollout/truncated"] == 0.25
    assert metrics["policy/loss"] == 0.25
    assert metrics["policy/skipped_updates"] == 0
    assert math.isnan(metrics["policy/kl"])
    assert math.isnan(metrics["policy/entropy"])


def test_every_step_has_every_metric_of_the_table_but_times_memory_and_evaluations() -> None:
    metrics = step_metrics(made_rollouts(), made_rewards(), made_update())
    elsewhere = ("timing_s/", "perf/", "memory/", "eval/")
    assert set(metrics) == {name for name in METRICS if not name.startswith(elsewhere)}


def test_what_the_update_measures_itself() -> None:
    own = {"mismatch/logprob_diff_max": 0.5, "approx_kl": 0.01, "mine": 1.0, "loss": 99.0}
    metrics = step_metrics(made_rollouts(), made_rewards(), made_update(metrics=own))
    assert metrics["mismatch/logprob_diff_max"] == 0.5
    assert metrics["policy/approx_kl"] == 0.01
    assert metrics["policy/mine"] == 1.0
    assert metrics["policy/loss"] == 0.25
    assert metrics["policy/own/loss"] == 99.0


def test_evaluations_get_their_prefix() -> None:
    evaluation = Evaluation(step=3, metrics={"pass@1": 0.5, "hard/pass@1": 0.25}, num_prompts=4)
    metrics = step_metrics(made_rollouts(), made_rewards(), made_update(), evaluation)
    assert metrics["eval/pass@1"] == 0.5
    assert metrics["eval/hard/pass@1"] == 0.25


def test_a_key_of_the_reward_function_does_not_pass_for_the_reward() -> None:
    metrics = step_metrics(made_rollouts(), made_rewards(metrics={"accuracy": 0.5, "mean": 99.0}), made_update())
    assert metrics["reward/accuracy"] == 0.5
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/own/mean"] == 99.0


def test_several_data_sources_have_their_own_means() -> None:
    rewards = made_rewards((1.0, None, 0.0, 1.0))
    metrics = step_metrics(made_rollouts(sources=("sums", "gsm8k")), rewards, made_update())
    assert metrics["reward/mean/sums"] == 1.0
    assert metrics["reward/mean/gsm8k"] == 0.5
    assert not any(name.startswith("reward/mean/") for name in step_metrics(made_rollouts(), rewards, made_update()))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.0, 0.0, 0.0, 1.0), 0),
        ((0.35, 0.35, 0.0, 1.0), 1),
        ((1.0, None, 0.0, 1.0), 1),
        ((None, None, 0.5, 0.5), 2),
        ((None, None, None, None), 2),
    ],
)
def test_groups_without_contrast(values: tuple[float | None, ...], expected: int) -> None:
    assert groups_without_contrast(made_rollouts(), made_rewards(values), mask_truncated=False) == expected


def test_fault_06_masked_and_empty_responses_make_no_contrast() -> None:
    """A response of three tokens is cut off, here."""
    cut, empty, rewards = made_rollouts(((3, 1, 2),), ("a",)), made_rollouts(((0, 1, 2),), ("a",)), (1.0, 0.0, 0.0)
    for rollouts, mask_truncated, expected in ((cut, False, 0), (cut, True, 1), (empty, False, 1)):
        metrics = step_metrics(rollouts, made_rewards(rewards), made_update(), mask_truncated=mask_truncated)
        assert metrics["rollout/groups_without_contrast"] == expected


def test_fault_19_all_responses_empty_or_invalid_is_logged() -> None:
    metrics = step_metrics(made_rollouts(((0, 0), (0, 0))), made_rewards((None,) * 4), made_update())
    assert metrics["reward/invalid"] == 4
    assert math.isnan(metrics["reward/mean"])
    assert metrics["rollout/response_length_max"] == 0


def test_a_step_without_any_response_has_metrics_too() -> None:
    metrics = step_metrics(Rollouts.from_responses([], []), made_rewards(()), made_update())
    assert metrics["rollout/groups_without_contrast"] == 0
    assert math.isnan(metrics["rollout/response_length_mean"])


def test_tokens_are_counted_with_the_prompt_of_each_response() -> None:
    assert num_tokens(made_rollouts(((3, 1), (2, 2)))) == 8 + 4 * 2
