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
from tandem.model.ranks import Ranks
from tests.ranks import RankProcesses
from tests.tiny import tiny_model_folder
from tests.unit.hybrid.made import contrast, rollout, trainer_logprobs, worker_of
from tests.unit.hybrid.on_ranks import start_on_ranks

Sections = Mapping[str, Mapping[str, Any]]
TWO: Sections = {}
BF16: Sections = {"model": {"dtype": "bfloat16"}}
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


@pytest.mark.parametrize("config", [TWO, SLICED], ids=["two", "tensor_parallel"])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Phi3ForCausalLM"])
def test_fault_27_engines_on_ranks_agree_with_the_trainer(
    ranks: RankProcesses, tmp_path: Path, config: Sections, architecture: str
) -> None:
    """Phi-3's fused weights are cut in two ranges."""
    tiny_model_folder(tmp_path / "model", architecture=architecture)
    for found in ranks.run(gaps, 2, tmp_path / "model", with_lora(tmp_path / "model", config)):
        assert max(found) < TOLERANCE


def save(workers: td.Workers, checkpoint: Path) -> None:
    """Weights and moments, each rank its part."""
    checkpoint.mkdir(exist_ok=True)
    workers._group.call(Worker.take_snapshot, copy=True)
    workers._group.start(Worker.write_snapshot, checkpoint).result()


def train_and_save(
    ranks: Ranks, config: Sections, checkpoint: Path, steps: int, begin: Path | None
) -> dict[str, float]:
    """Go on from a checkpoint, or begin; update; save. Returns what the last update reports."""
    with start_on_ranks(ranks, Path(config["model"]["path"]), config) as workers:
        training = worker_of(workers).training
        assert training.lora is not None
        if begin is not None:
            read_factors(begin / "model", training.weights.shards(), training.lora.pieces)
            worker_of(workers).load_optimizer(begin, {"skipped_in_row": 0})
        reported = {}
        for step in range(1, steps + 1):
            rollouts = rollout(workers, step=step)
            with workers.train_phase() as trainer:
                reference = trainer.ref_logprobs(rollouts)
                update = trainer.update(rollouts, contrast(rollouts), ref_logprobs=reference)
                reported = {"loss": update.loss, "kl": update.kl or 0.0, "grad_norm": update.grad_norm}
            assert training.reference is None, "the base is the policy without its adapters"
        save(workers, checkpoint)
    return reported


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return {
        name: tensor for file in sorted(checkpoint.rglob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm."""
    squares = sum(float((one[name] - other[name]).double().square().sum()) for name in other)
    return (squares / sum(float(tensor.double().square().sum()) for tensor in other.values())) ** 0.5


LR: Sections = {"trainer": {"lr": 1e-3, "betas": [0.0, 0.999]}}  # then the first moment is the gradient


@pytest.mark.parametrize("config", [TWO, SLICED, BF16], ids=["two", "tensor_parallel", "bfloat16"])
def test_gradients_on_ranks_are_those_of_one(ranks: RankProcesses, tmp_path: Path, config: Sections) -> None:
    """Contract 2, from adapters that are not zero, which 2 ranks have saved (fault 40)."""
    folder = tiny_model_folder(tmp_path / "model")
    config = {**config, **LR, "model": {"path": str(folder), "lora_rank": 3, **config.get("model", {})}}
    ranks.run(train_and_save, 2, config, tmp_path / "begun", 2, None)
    for size, name in ((1, "one"), (2, "two")):
        ranks.run(train_and_save, size, config, tmp_path / f"{name}_unchanged", 0, tmp_path / "begun")
        [reported, *_] = ranks.run(train_and_save, size, config, tmp_path / name, 1, tmp_path / "begun")
    begun, one, two = (tensors_of(tmp_path / each) for each in ("begun", "one", "two"))
    gradient = {name for name in one if name.startswith("exp_avg.")}
    assert len(gradient) == 2 * 7 * 2, "A and B of each of a layer's 7 linear layers"
    print(distance({n: two[n] for n in gradient}, {n: one[n] for n in gradient}), reported)
    for unchanged in ("one_unchanged", "two_unchanged"):
        found = tensors_of(tmp_path / unchanged)
        assert found.keys() == begun.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in begun.items())
