"""Phases: what is legal when, who has memory when, and that nothing of the user's process changes."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tandem as td
from tandem.errors import FunctionError, PhaseError
from tests.unit.hybrid.made import contrast, prompts_of, rollout, start_tiny, worker_of


@pytest.fixture
def workers(tmp_path: Path) -> td.Workers:
    return start_tiny(tmp_path / "model")


@pytest.mark.parametrize("outer", ["rollout", "train"])
@pytest.mark.parametrize("inner", ["rollout", "train"])
def test_a_phase_inside_of_a_phase_is_refused(workers: td.Workers, outer: str, inner: str) -> None:
    phases = {"rollout": workers.rollout_phase, "train": workers.train_phase}
    with (
        phases[outer](),
        pytest.raises(PhaseError, match=f"{inner} phase inside of the {outer} phase"),
        phases[inner](),
    ):
        pass
    with phases[inner]():
        pass  # the refused one has left nothing behind


def test_after_an_error_in_a_phase_the_next_one_can_begin(workers: td.Workers) -> None:
    with pytest.raises(ZeroDivisionError), workers.rollout_phase():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), workers.train_phase():
        raise ZeroDivisionError
    assert len(rollout(workers)) == 16


def test_advantages_that_are_no_tensor_are_named(workers: td.Workers) -> None:
    rollouts = rollout(workers)
    with workers.train_phase() as trainer, pytest.raises(FunctionError, match=r"are a ndarray\n.*torch\.as_tensor"):
        trainer.update(rollouts, contrast(rollouts).numpy())


def test_a_handle_works_inside_of_its_block_only(workers: td.Workers) -> None:
    with workers.rollout_phase() as engine:
        rollouts = engine.generate(prompts_of(workers), n=2, max_response_length=4, step=1)
        unfinished = engine.stream(prompts_of(workers), engine.options(step=1, n=2, max_response_length=4))
        next(unfinished)
    with workers.train_phase() as trainer:
        trainer.update(rollouts, contrast(rollouts))
    with pytest.raises(PhaseError, match="rollout phase has ended"):
        engine.generate(prompts_of(workers), n=2, max_response_length=4, step=1)
    with pytest.raises(PhaseError, match="rollout phase has ended"):
        next(unfinished)
    for call in (
        lambda: trainer.update(rollouts, contrast(rollouts)),
        lambda: trainer.old_logprobs(rollouts),
        lambda: trainer.ref_logprobs(rollouts),
        lambda: trainer.supervised_update([[5]], [[6, 1]], lr=1e-3),
    ):
        with pytest.raises(PhaseError, match="train phase has ended"):
            call()


def test_memory_changes_hands(workers: td.Workers) -> None:
    """While training there is no KV cache, while sampling there are no gradients."""
    worker = worker_of(workers)
    assert worker.sampling.engine._cache is None
    with workers.rollout_phase() as engine:
        rollouts = engine.generate(prompts_of(workers), n=4, max_response_length=8, step=1)
        assert worker.sampling.engine._cache is not None
        assert all(weight.grad is None for weight in workers.model.parameters())
    assert worker.sampling.engine._cache is None
    assert worker.sampling.engine._packed is None
    with workers.train_phase() as trainer:
        trainer.update(rollouts, contrast(rollouts))
        assert worker.sampling.engine._cache is None
        assert all(weight.grad is None for weight in worker.training.weights.parameters())
        trainer.supervised_update([[5, 6]], [[7, 1]], lr=1e-3)
        assert all(weight.grad is None for weight in worker.training.weights.parameters())


def test_the_policy_version_counts_updates_that_changed_the_weights(workers: td.Workers) -> None:
    rollouts = rollout(workers)
    assert (workers.policy_version, rollouts.policy_version) == (0, 0)
    with workers.train_phase() as trainer:
        assert trainer.update(rollouts, contrast(rollouts)).policy_version == 1
        assert trainer.update(rollouts, contrast(rollouts)).policy_version == 2
    assert workers.policy_version == 2
    assert rollout(workers).policy_version == 2
    assert worker_of(workers).sampling.engine.policy_version == 2
    with workers.train_phase() as trainer:
        idle = trainer.update(rollouts, torch.zeros(len(rollouts)))
    assert (idle.num_updates, idle.policy_version, workers.policy_version) == (0, 2, 2)
    with workers.train_phase() as trainer:
        trainer.supervised_update([[5]], [[6, 1]], lr=1e-3)
    assert workers.policy_version == 3


def test_fault_12_rollouts_of_an_older_policy_are_never_taken_for_on_policy(workers: td.Workers) -> None:
    """Old log-probs are then those kept while sampling; else every ratio would be 1 and nothing would be clipped."""
    rollouts = rollout(workers)
    with workers.train_phase() as trainer:
        fresh = trainer.update(rollouts, contrast(rollouts))
        stale = trainer.update(rollouts, contrast(rollouts))
    assert (fresh.ratio_mean, fresh.ratio_max) == (1.0, 1.0)
    assert stale.ratio_max > 1.01
    assert stale.clip_fraction > 0


def test_fault_12_after_an_update_that_was_broken_off_its_rollouts_are_of_an_older_policy(tmp_path: Path) -> None:
    """The first of two mini-batches has changed the weights."""
    config = {"data": {"prompts_per_step": 1}, "rollout": {"n": 8}, "trainer": {"mini_batch_responses": 8}}
    workers = start_tiny(tmp_path / "model", lr=0.1, config=config)
    rollouts = rollout(workers)
    calls = 0

    def raises_at_the_second_call(*, logprobs: torch.Tensor, advantages: torch.Tensor, **_: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return -advantages * logprobs

    with workers.train_phase() as trainer, pytest.raises(KeyboardInterrupt):
        trainer.update(rollouts, contrast(rollouts), loss=raises_at_the_second_call)
    with workers.train_phase() as trainer:
        update = trainer.update(rollouts, contrast(rollouts))
    assert update.ratio is not None
    near_one = (update.ratio - 1.0).abs()[rollouts.response_mask] < 1e-3
    assert near_one.float().mean() < 0.1, "the ratio is to the policy after the interruption"
    assert rollout(workers).policy_version == workers.policy_version


def test_advantages_of_a_wrong_shape_are_refused(workers: td.Workers) -> None:
    rollouts = rollout(workers)
    wide = rollouts.response_mask.shape[1] + 1
    with workers.train_phase() as trainer:
        for shape in ((3,), (16, wide), (16, 1, 1)):
            with pytest.raises(ValueError, match="advantages of shape"):
                trainer.update(rollouts, torch.ones(shape))
        with pytest.raises(ValueError, match="old_logprobs of shape"):
            trainer.update(rollouts, contrast(rollouts), torch.zeros(16, wide))
        assert trainer.num_updates == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_advantages_that_are_not_finite_are_refused(workers: td.Workers, value: float) -> None:
    rollouts = rollout(workers)
    advantages = contrast(rollouts)
    advantages[2] = value
    with workers.train_phase() as trainer, pytest.raises(ValueError, match="not finite"):
        trainer.update(rollouts, advantages)


def test_a_falling_learning_rate_needs_a_number_of_steps(tmp_path: Path) -> None:
    """Without one it stayed constant, without a word."""
    trainer = {"lr_schedule": "linear"}
    with pytest.raises(td.ConfigError, match=r"trainer.lr_schedule: linear has no effect: (?s:.*) set run.steps"):
        start_tiny(tmp_path / "model", config={"trainer": trainer})
    workers = start_tiny(tmp_path / "model", lr=1e-3, config={"trainer": trainer, "run": {"steps": 2}})
    rollouts = rollout(workers)
    with workers.train_phase() as phase:
        assert [phase.update(rollouts, contrast(rollouts)).lr for _ in range(2)] == [5e-4, 0.0]


def test_fault_12_more_responses_than_the_config_speaks_of_are_several_updates(tmp_path: Path) -> None:
    """In a loop of one's own the number of responses is anybody's: 16 here, for a step of 8 in the config."""
    config = {"data": {"prompts_per_step": 1}, "rollout": {"n": 8}, "trainer": {"mini_batch_responses": 8}}
    workers = start_tiny(tmp_path / "model", config=config)
    rollouts = rollout(workers)
    with workers.train_phase() as trainer:
        assert trainer.old_logprobs(rollouts) is None
        update = trainer.update(rollouts, contrast(rollouts))
    assert update.num_updates == 2
    assert update.ratio_max > 1.01


@pytest.mark.parametrize("old_logprobs", ["update", "rollout", "recompute"])
def test_old_logprobs_come_from_where_the_config_says(tmp_path: Path, old_logprobs: str) -> None:
    workers = start_tiny(tmp_path / "model", config={"algorithm": {"old_logprobs": old_logprobs}})
    rollouts = rollout(workers)
    with workers.train_phase() as trainer:
        found = trainer.old_logprobs(rollouts)
    if old_logprobs == "update":
        assert found is None
    else:
        assert (found is rollouts.rollout_logprobs) == (old_logprobs == "rollout")
        torch.testing.assert_close(found, rollouts.rollout_logprobs, rtol=0, atol=2e-5)


def test_dropped_groups_and_cut_off_responses_are_out_of_the_denominator(tmp_path: Path) -> None:
    """`idle_groups=drop` and `mask_truncated`: the loss of two responses, divided by their own tokens alone."""
    rollouts = rollout(start_tiny(tmp_path / "model"), n=2)
    rollouts = replace(rollouts, finish_reasons=("stop", "stop", "length", *["stop"] * 5))
    advantages = torch.tensor([0.0, 0.0, 2.0, -1.0, 0.0, 0.0, 2.0, -1.0])
    found = {}
    for name, algorithm in {
        "keep": {},
        "drop": {"idle_groups": "drop"},
        "mask": {"mask_truncated": True},
    }.items():
        workers = start_tiny(tmp_path / "model", config={"algorithm": algorithm})
        with workers.train_phase() as trainer:
            found[name] = trainer.update(rollouts, advantages)
    lengths = rollouts.response_lengths.double()
    signed = float((advantages.double() * lengths).sum())
    assert found["keep"].loss == pytest.approx(-signed / float(lengths.sum()), abs=1e-6)
    active = advantages.ne(0)
    assert found["drop"].loss == pytest.approx(-signed / float(lengths[active].sum()), abs=1e-6)
    assert found["drop"].grad_norm > found["keep"].grad_norm
    whole = ~rollouts.truncated
    signed = float((advantages.double() * lengths)[whole].sum())
    assert found["mask"].loss == pytest.approx(-signed / float(lengths[whole].sum()), abs=1e-6)
    assert len({round(update.loss, 4) for update in found.values()}) == 3


def test_fault_08_advantages_outside_of_the_mask_keep_no_group(tmp_path: Path) -> None:
    rollouts = rollout(start_tiny(tmp_path / "model"), n=2)
    mask = rollouts.response_mask.clone()
    mask[0, 1:] = False  # of a group without contrast
    rollouts = replace(rollouts, response_mask=mask)
    advantages = torch.tensor([0.0, 0.0, 2.0, -1.0, 0.0, 0.0, 2.0, -1.0])[:, None]
    losses = []
    for outside in (0.0, float("nan")):
        workers = start_tiny(tmp_path / "model", config={"algorithm": {"idle_groups": "drop"}})
        with workers.train_phase() as trainer:
            losses.append(trainer.update(rollouts, torch.where(mask, advantages, outside)).loss)
    assert losses[0] == losses[1] != 0


def global_state() -> dict[str, object]:
    """What a library must leave alone."""
    root = logging.getLogger()
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "torch random numbers": torch.random.get_rng_state().numpy().tobytes(),
        "numpy random numbers": np.random.get_state()[1].tobytes(),
        "python random numbers": random.getstate(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "logging": (root.level, list(root.handlers), logging.getLogger("transformers").level),
        "environment": dict(os.environ),
        "hooks": (sys.excepthook, sys.stdout, sys.stderr),
        "folder": Path.cwd(),
    }


def test_starting_and_each_call_leave_the_process_as_it_was(tmp_path: Path) -> None:
    """Also between two responses of a stream, where the user's own code runs."""
    start_tiny(tmp_path / "model")  # what transformers sets at its own first use is not ours
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # the workers use 1
    torch.use_deterministic_algorithms(True, warn_only=True)  # the workers insist
    try:
        before = global_state()
        workers = start_tiny(tmp_path / "model")
        assert global_state() == before
        with workers.rollout_phase() as engine:
            assert global_state() == before
            options = engine.options(step=1, n=4, max_response_length=8)
            responses = []
            for response in engine.stream(prompts_of(workers), options):
                assert global_state() == before
                responses.append(response)
            rollouts = engine.as_rollouts(prompts_of(workers), responses, options)
        with workers.train_phase() as trainer:
            trainer.old_logprobs(rollouts)
            trainer.ref_logprobs(rollouts)
            assert global_state() == before
            trainer.update(rollouts, contrast(rollouts))
            assert global_state() == before
        workers.export(tmp_path / "export")
        assert global_state() == before
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def test_the_same_calls_give_the_same_bits_whatever_the_user_draws_in_between(tmp_path: Path) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        workers = start_tiny(tmp_path / "model")
        rollouts = rollout(workers)
        torch.rand(seed)
        with workers.train_phase() as trainer:
            trainer.update(rollouts, contrast(rollouts))
        found.append(torch.cat([weight.detach().flatten() for weight in workers.model.parameters()]))
    assert torch.equal(*found)
