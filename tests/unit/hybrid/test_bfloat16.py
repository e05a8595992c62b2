"""A run in bfloat16: what is rounded, what is not, and how far engine and trainer are apart."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tandem as td
from tests.unit.hybrid.made import contrast, rollout, start_tiny, trainer_logprobs, worker_of

BF16 = {"model": {"dtype": "bfloat16"}}


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_body_in_bfloat16_head_and_masters_in_float32(tmp_path: Path, tie: bool) -> None:
    workers = start_tiny(tmp_path / "model", tie=tie, config=BF16)
    worker = worker_of(workers)
    head = workers.model.get_output_embeddings().weight
    assert head.dtype == torch.float32
    body = [weight for weight in workers.model.parameters() if weight is not head]
    assert body
    assert {weight.dtype for weight in body} == {torch.bfloat16}
    assert {weight.dtype for weight in worker.training.weights.parameters()} == {torch.float32}


def test_the_head_can_be_bfloat16_too(tmp_path: Path) -> None:
    config = {"model": {"dtype": "bfloat16", "head_dtype": "bfloat16"}}
    workers = start_tiny(tmp_path / "model", tie=False, config=config)
    assert {weight.dtype for weight in workers.model.parameters()} == {torch.bfloat16}
    rollouts = rollout(workers)
    assert float((trainer_logprobs(workers, rollouts) - rollouts.rollout_logprobs).abs().mean()) < 0.1


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_whole_step_and_engine_and_trainer_agree(tmp_path: Path, tie: bool) -> None:
    """Both round to 8 bits, at mostly the same places: log-probs around -4 are 0.0004 apart on average, 0.02 at most.

    In float32 it is 1e-6. (All in bfloat16 they could not be nearer than 0.016.)
    """
    workers = start_tiny(tmp_path / "model", tie=tie, config=BF16)
    for _ in range(2):
        rollouts = rollout(workers, n=8, length=16)
        difference = (trainer_logprobs(workers, rollouts) - rollouts.rollout_logprobs)[rollouts.response_mask]
        assert difference.abs().mean() < 0.005
        assert difference.abs().max() < 0.1
        with workers.train_phase() as trainer:
            update = trainer.update(rollouts, contrast(rollouts))
        assert update.num_updates == 1
        assert update.ratio_max == 1.0
        assert update.metrics["mismatch/logprob_diff_mean"] == pytest.approx(float(difference.abs().mean()), abs=1e-3)
    assert rollout(workers).policy_version == 2


def test_updates_too_small_for_bfloat16_are_not_lost(tmp_path: Path) -> None:
    """The masters take each of them, and what is exported has them."""
    workers = start_tiny(tmp_path / "model", lr=1e-6, config=BF16)
    rollouts = rollout(workers)
    before = {name: shard.tensor.clone() for name, shard in worker_of(workers).training.weights.shards().items()}
    with workers.train_phase() as trainer:
        trainer.update(rollouts, contrast(rollouts))
    after = worker_of(workers).training.weights.shards()
    moved = torch.cat([(after[name].tensor != before[name]).flatten() for name in before])
    assert moved.float().mean() > 0.9
    workers.export(tmp_path / "export", dtype=torch.float32)
    saved = load_file(tmp_path / "export" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(saved[name], after[name].tensor)


def test_what_is_exported_has_the_precision_of_the_folder_it_came_from(tmp_path: Path) -> None:
    workers: td.Workers = start_tiny(tmp_path / "model", config=BF16)
    workers.export(tmp_path / "export")
    saved = load_file(tmp_path / "export" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def float32_numbers() -> int:
    """How many numbers all float32 tensors of this process hold."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return sum({one.data_ptr(): one.numel() for one in tensors if one.dtype == torch.float32}.values())


def test_the_reference_is_kept_in_the_dtype_it_computes_in_and_in_no_other(tmp_path: Path) -> None:
    """It is never updated: float32 masters of it would be most of its memory."""
    workers = start_tiny(tmp_path / "model", config=BF16)
    rollouts = rollout(workers)
    with workers.train_phase() as trainer:
        before = float32_numbers()
        trainer.ref_logprobs(rollouts)
        added = float32_numbers() - before
    head = workers.model.get_output_embeddings().weight.numel()
    body = sum(weight.numel() for weight in workers.model.parameters()) - head
    assert added < head + body / 2
