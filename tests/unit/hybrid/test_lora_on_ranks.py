"""Adapters on several ranks: engines get merged weights, gradients are those of one rank, files fit any number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tandem as td
from tandem.hybrid.worker import Worker
from tandem.model.adapter_files import read_factors
from tandem.model.merge import merge_adapter
from tandem.model.ranks import Ranks
from tandem.model.whole_tensors import WholeTensors
from tests.ranks import RankProcesses
from tests.tiny import tiny_model_folder
from tests.unit.hybrid.made import contrast, rollout, trainer_logprobs, worker_of
from tests.unit.hybrid.on_ranks import start_on_ranks

Sections = Mapping[str, Mapping[str, Any]]
TWO: Sections = {"trainer": {"offload": "disk"}}
SLICED: Sections = {"rollout": {"tensor_parallel": 2}}
TOLERANCE = 2e-5  # nats, contract 3, in float32


def with_lora(folder: Path, config: Sections, **model: Any) -> dict[str, Mapping[str, Any]]:
    """A config of adapters on the model in `folder`."""
    return {**config, "model": {"path": str(folder), "lora_rank": 4, **model}}


def gaps(ranks: Ranks, folder: Path, config: Sections) -> list[float]:
    """Largest differences of engine and trainer: at step 0 and after a large update."""
    found = []
    with start_on_ranks(ranks, folder, config) as workers:
        for step in (0, 1):
            rollouts = rollout(workers, step=step)
            with workers.train_phase() as trainer:
                before = trainer_logprobs(workers, rollouts)
                found.append(float((before - rollouts.rollout_logprobs)[rollouts.response_mask].abs().max()))
                trainer.update(rollouts, contrast(rollouts))
                assert float((trainer_logprobs(workers, rollouts) - before).abs().max()) > 0.5, "hardly moved"
    return found


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("Qwen3ForCausalLM", TWO), ("Qwen3ForCausalLM", SLICED), ("Phi3ForCausalLM", SLICED)],
)
def test_fault_27_engines_on_ranks_agree_with_the_trainer(
    ranks: RankProcesses, tmp_path: Path, architecture: str, config: Sections
) -> None:
    """Phi-3's fused weights are cut into several ranges."""
    tiny_model_folder(tmp_path / "model", architecture=architecture)
    for found in ranks.run(gaps, 2, tmp_path / "model", with_lora(tmp_path / "model", config)):
        assert max(found) < TOLERANCE


def save(workers: td.Workers, checkpoint: Path) -> None:
    """Weights and moments, each rank its part."""
    checkpoint.mkdir(exist_ok=True)
    workers._group.call(Worker.take_snapshot, copy=True)
    workers._group.start(Worker.write_snapshot, checkpoint).result()


def rollouts_and_checkpoint(ranks: Ranks, config: Sections, checkpoint: Path) -> td.Rollouts:
    """Two updates from the base, saved, and what the policy answers then."""
    with start_on_ranks(ranks, Path(config["model"]["path"]), config) as workers:
        for step in (1, 2):
            rollouts = rollout(workers, step=step)
            with workers.train_phase() as trainer:
                trainer.update(rollouts, contrast(rollouts))
        save(workers, checkpoint)
        return rollout(workers, step=3)


def update_from(ranks: Ranks, config: Sections, begin: Path, rollouts: td.Rollouts, to: Path) -> dict[str, float]:
    """Go on from a checkpoint with one update; save before and after. Returns what it reports."""
    with start_on_ranks(ranks, Path(config["model"]["path"]), config) as workers:
        training = worker_of(workers).training
        assert training.lora is not None
        read_factors(begin / "model", training.weights.shards(), training.lora.pieces)
        training.weights.write_back()
        worker_of(workers).load_optimizer(begin, {"skipped_in_row": 0})
        save(workers, to / "before")
        with workers.train_phase() as trainer:
            reference = trainer.ref_logprobs(rollouts)
            update = trainer.update(rollouts, contrast(rollouts), ref_logprobs=reference)
        assert training.reference is None, "the base is the policy without its adapters"
        save(workers, to / "after")
    assert update.kl is not None
    return {"loss": update.loss, "kl": update.kl, "grad_norm": update.grad_norm}


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return {
        name: tensor for file in sorted(checkpoint.rglob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm."""
    squares = sum(float((one[name] - other[name]).double().square().sum()) for name in other)
    return (squares / sum(float(tensor.double().square().sum()) for tensor in other.values())) ** 0.5


GRADIENT: Sections = {"trainer": {"lr": 1e-3, "betas": [0.0, 0.999]}}  # then the first moment is the gradient


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_fault_40_a_checkpoint_of_two_ranks_goes_on_alike_on_one_and_two(
    ranks: RankProcesses, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    """Contract 2: the gradient to 1e-5 of its norm. In bfloat16 a rank's products are of other rows."""
    folder = tiny_model_folder(tmp_path / "model")
    config = with_lora(folder, GRADIENT, dtype=dtype)
    rollouts, _ = ranks.run(rollouts_and_checkpoint, 2, config, tmp_path / "begun")
    reports = []
    for size, name in ((1, "one"), (2, "two")):
        (tmp_path / name).mkdir()
        reports += ranks.run(update_from, size, config, tmp_path / "begun", rollouts, tmp_path / name)
    begun, one, two = (tensors_of(tmp_path / each) for each in ("begun", "one/after", "two/after"))
    for unchanged in ("one/before", "two/before"):
        found = tensors_of(tmp_path / unchanged)
        assert found.keys() == begun.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in begun.items())
    gradient = {name for name in one if name.startswith("exp_avg.")}
    assert len(gradient) == 2 * 7 * 2, "A and B of each of a layer's 7 linear layers"
    assert distance(two, {name: one[name] for name in gradient}) < tolerance
    assert reports[1] == reports[2]
    assert reports[1] == pytest.approx(reports[0], rel=10 * tolerance, abs=tolerance)
    assert reports[0]["kl"] > 1e-3


def handed_out(ranks: Ranks, config: Sections, export: Path) -> dict[str, Tensor]:
    """Whole merged tensors after an update, in buckets of a few tensors; the adapters are written as well."""
    with start_on_ranks(ranks, Path(config["model"]["path"]), config) as workers:
        rollouts = rollout(workers)
        with workers.train_phase() as trainer:
            trainer.update(rollouts, contrast(rollouts))
        training = worker_of(workers).training
        whole = WholeTensors(
            ranks,
            training.policy.model,
            training.engine_shards(),
            names=training.names,
            dtype=torch.float32,
            device=torch.device("cpu"),
            lora=training.lora,
            bucket_bytes=40_000,
        )
        for _ in range(2):  # the plan serves again
            read = {name: tensor.clone() for name, tensor in whole.read(training.engine_shards())}
        save(workers, export)
        return read


def test_two_ranks_hand_out_merged_tensors_which_are_those_of_an_export(ranks: RankProcesses, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", tie=False)
    config = with_lora(folder, {}, lora_targets=["q_proj", "down_proj"])
    found = ranks.run(handed_out, 2, config, tmp_path / "saved")
    merge_adapter(tmp_path / "saved" / "model", dtype=torch.float32)
    base, merged = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "saved" / "model"))
    assert sum(not torch.equal(base[name], merged[name]) for name in base) == 2 * 2
    for read in found:
        assert read.keys() == merged.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(read[name], tensor, rtol=0, atol=1e-6)
