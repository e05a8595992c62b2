"""The correction that the config asks for reaches the update, and mismatch and staleness are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tandem as td
from tests.unit.hybrid.made import contrast, rollout, start_tiny

OFF = 0.5  # nats by which the engine's log-probs are changed by hand


def update(folder: Path, algorithm: Mapping[str, Any]) -> tuple[Tensor, td.UpdateResult]:
    """One step with an engine that is off on each second token; how far the weights have moved."""
    workers = start_tiny(folder, config={"algorithm": algorithm})
    rollouts = rollout(workers)
    columns = torch.arange(rollouts.rollout_logprobs.shape[1])
    shifted = rollouts.rollout_logprobs - OFF * (columns % 2)
    before = torch.cat([weight.detach().flatten().clone() for weight in workers.model.parameters()])
    with workers.train_phase() as trainer:
        old = trainer.old_logprobs(rollouts)
        result = trainer.update(replace(rollouts, rollout_logprobs=shifted), contrast(rollouts), old)
    after = torch.cat([weight.detach().flatten() for weight in workers.model.parameters()])
    return after - before, result


@pytest.mark.parametrize("old_logprobs", ["update", "recompute"])
def test_the_update_is_corrected_as_the_config_says(tmp_path: Path, old_logprobs: str) -> None:
    """exp(0.5) = 1.65 is outside of a range that ends at 1.2."""
    settings = {"old_logprobs": old_logprobs, "correction_range": [0.0, 1.2]}
    moved = {}
    for correction in ("none", "token_tis", "token_mask"):
        moved[correction], result = update(tmp_path / "model", {"correction": correction, **settings})
        assert result.metrics["mismatch/logprob_diff_max"] == pytest.approx(OFF, abs=1e-4)
        assert 0.3 < result.metrics["mismatch/share_outside"] < 0.6
    assert (moved["none"] - moved["token_tis"]).norm() > 1e-3
    assert (moved["token_tis"] - moved["token_mask"]).norm() > 1e-3


def test_of_rollouts_that_are_used_again_mismatch_and_staleness_are_told_apart(tmp_path: Path) -> None:
    config = {"algorithm": {"old_logprobs": "recompute", "correction": "token_tis"}}
    workers = start_tiny(tmp_path / "model", config=config)
    rollouts = rollout(workers)
    with workers.train_phase() as trainer:
        sampling = trainer.old_logprobs(rollouts)
        assert sampling is not None
        fresh = trainer.update(rollouts, contrast(rollouts), sampling)
        moved_on = trainer.old_logprobs(rollouts)
        stale = trainer.update(rollouts, contrast(rollouts), moved_on, sampling_logprobs=sampling)
        unknown = trainer.update(rollouts, contrast(rollouts), trainer.old_logprobs(rollouts))
    assert fresh.metrics["mismatch/kl"] < 1e-9
    assert fresh.metrics["mismatch/staleness_kl"] == 0.0
    assert stale.metrics["mismatch/kl"] < 1e-9
    assert stale.metrics["mismatch/staleness_kl"] > 1e-3
    assert "mismatch/kl" not in unknown.metrics
    with workers.train_phase() as trainer, pytest.raises(ValueError, match="sampling_logprobs of shape"):
        trainer.update(rollouts, contrast(rollouts), sampling_logprobs=torch.zeros(1, 1))


def test_fault_22_log_probs_of_a_cut_distribution_are_never_the_old_ones(tmp_path: Path) -> None:
    """Of an earlier policy, too, where those kept while sampling would be: the trainer's own have to be handed in."""
    workers = start_tiny(tmp_path / "model", config={"algorithm": {"old_logprobs": "recompute"}})
    stale = replace(rollout(workers), cut_logprobs=True, policy_version=-1)
    with workers.train_phase() as trainer:
        old = trainer.old_logprobs(stale)
        with pytest.raises(ValueError, match=r"of a cut distribution: hand in old_logprobs"):
            trainer.update(stale, contrast(stale))
        assert trainer.update(stale, contrast(stale), old).num_updates == 1
