"""Workers of several ranks: both layouts agree, nothing is held twice, and what they save fits any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import tandem as td
from tandem.errors import ClusterError
from tandem.hybrid.worker import Worker
from tandem.model.ranks import Ranks
from tests.ranks import RankProcesses
from tests.tiny import tiny_model_folder, tiny_tokenizer
from tests.unit.hybrid.made import contrast, prompts_of, rollout, trainer_logprobs, worker_of
from tests.unit.hybrid.on_ranks import start_on_ranks

Sections = Mapping[str, Mapping[str, Any]]
LAYOUTS: Mapping[str, tuple[int, Sections]] = {
    "two": (2, {}),
    "tensor_parallel": (2, {"rollout": {"tensor_parallel": 2}}),
    "four": (4, {"rollout": {"tensor_parallel": 2}, "trainer": {"replicas": 2, "offload": "disk"}}),
}
TOLERANCE = 2e-5  # nats, contract 3, in float32
# In bfloat16, mean and largest. One rank has 0.003 and 0.03; a tensor-parallel product is rounded on each rank before
# the sum, and again after it. What an update moves is above 0.5: old weights would be seen.
BF16_MEAN, BF16_MAX, BF16_MEAN_AFTER_A_HUGE_UPDATE = 0.01, 0.1, 0.05
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def gaps_over_updates(ranks: Ranks, folder: Path, config: Sections) -> list[tuple[float, float]]:
    """Mean and largest gap between engine and trainer: before any update, after one, and after a huge one."""
    gaps = []
    with start_on_ranks(ranks, folder, config) as workers:
        for lr in (1e-3, 0.3, None):
            rollouts = rollout(workers)
            with workers.train_phase() as trainer:
                logprobs = trainer_logprobs(workers, rollouts)
                gap = (logprobs - rollouts.rollout_logprobs)[rollouts.response_mask].abs()
                gaps.append((float(gap.mean()), float(gap.max())))
                if lr is not None:
                    worker = worker_of(workers)
                    trainer.supervised_update([[1, 2, 3]], [[4, 5, 6]], lr=lr)
                    moved = (trainer_logprobs(workers, rollouts) - logprobs).abs().max()
                    assert lr < 0.1 or float(moved) > 0.5, "hardly moved"
                    assert not any(weight.grad is not None for weight in worker.training.weights.parameters())
    return gaps


@layouts
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_fault_25_engine_and_trainer_agree_on_ranks(
    ranks: RankProcesses, tmp_path: Path, layout: str, tie: bool
) -> None:
    size, config = LAYOUTS[layout]
    tiny_model_folder(tmp_path / "model", tie=tie)
    for gaps in ranks.run(gaps_over_updates, size, tmp_path / "model", config):
        assert max(largest for _, largest in gaps) < TOLERANCE


@layouts
def test_in_bfloat16_too(ranks: RankProcesses, tmp_path: Path, layout: str) -> None:
    size, config = LAYOUTS[layout]
    tiny_model_folder(tmp_path / "model")
    for gaps in ranks.run(gaps_over_updates, size, tmp_path / "model", {**config, "model": {"dtype": "bfloat16"}}):
        (first_mean, first_max), (mean, largest), (mean_after, _) = gaps
        assert max(first_mean, mean) < BF16_MEAN
        assert max(first_max, largest) < BF16_MAX
        assert mean_after < BF16_MEAN_AFTER_A_HUGE_UPDATE


def two_steps(ranks: Ranks, folder: Path, config: Sections, export: Path) -> dict[str, float]:
    """Sample, update, twice, with a reference; write the policy. Returns what the last update reports."""
    with start_on_ranks(ranks, folder, {**config, "model": {"path": str(folder)}}) as workers:
        for step in (1, 2):
            rollouts = rollout(workers, step=step)
            with workers.train_phase() as trainer:
                reference = trainer.ref_logprobs(rollouts)
                update = trainer.update(rollouts, contrast(rollouts), ref_logprobs=reference)
        export.mkdir(exist_ok=True)
        workers._save(export, torch.float32)
    assert update.kl is not None
    return {"loss": update.loss, "kl": update.kl, "grad_norm": update.grad_norm, "entropy": update.entropy or 0.0}


@layouts
def test_steps_on_ranks_are_those_of_one(ranks: RankProcesses, tmp_path: Path, layout: str) -> None:
    """Contract 4. Weights to 1e-5 of their norm: sums over ranks are rounded in another order."""
    size, config = LAYOUTS[layout]
    folder = tiny_model_folder(tmp_path / "model")
    [expected] = ranks.run(two_steps, 1, folder, {"trainer": {"lr": 1e-3}}, tmp_path / "one")
    config = {**config, "trainer": {**config.get("trainer", {}), "lr": 1e-3}}
    for reported in ranks.run(two_steps, size, folder, config, tmp_path / "many"):
        assert reported == pytest.approx(expected, rel=1e-4, abs=1e-6)
    one, many, before = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "many", "model"))
    assert one.keys() == many.keys() == before.keys()
    assert distance(many, one) < 1e-5
    assert distance(one, before) > 1e-3, "nothing was trained"


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm."""
    squares = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (squares / sum(float(weight.double().square().sum()) for weight in other.values())) ** 0.5


def write_checkpoint(ranks: Ranks, folder: Path, config: Sections, checkpoint: Path) -> None:
    """A policy and its moments after one update."""
    with start_on_ranks(ranks, folder, config) as workers:
        rollouts = rollout(workers)
        with workers.train_phase() as trainer:
            trainer.update(rollouts, contrast(rollouts))
        rollout(workers, step=2)  # what there is to save may be away
        save(workers, checkpoint)


def read_and_write(ranks: Ranks, checkpoint: Path, config: Sections, copy: Path) -> None:
    """Take it up and save it again."""
    with start_on_ranks(ranks, checkpoint / "model", config) as workers:
        worker_of(workers).load_optimizer(checkpoint, {"skipped_in_row": 0})
        save(workers, copy)


def save(workers: td.Workers, checkpoint: Path) -> None:
    checkpoint.mkdir(exist_ok=True)
    workers._group.call(Worker.take_snapshot, copy=True)
    workers._group.start(Worker.write_snapshot, checkpoint).result()


@pytest.mark.parametrize("written_on", ["two", "four"])
def test_fault_40_a_checkpoint_fits_any_number_of_ranks(ranks: RankProcesses, tmp_path: Path, written_on: str) -> None:
    size, config = LAYOUTS[written_on]
    folder = tiny_model_folder(tmp_path / "model")
    ranks.run(write_checkpoint, size, folder, config, tmp_path / "checkpoint")
    expected = tensors_of(tmp_path / "checkpoint")
    assert any(name.startswith("exp_avg_sq.") and float(tensor.sum()) > 0 for name, tensor in expected.items())
    for size in (1, 2, 3, 4):
        ranks.run(read_and_write, size, tmp_path / "checkpoint", {}, tmp_path / f"on_{size}")
        found = tensors_of(tmp_path / f"on_{size}")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return {
        name: tensor for file in sorted(checkpoint.rglob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def bytes_of(tensors: Any) -> int:
    """Memory that tensors have, shared ones once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if not tensor.is_meta}
    return sum(storage.nbytes() for storage in storages.values())


def held(workers: td.Workers) -> dict[str, int]:
    """Bytes of what a phase may hold."""
    worker = worker_of(workers)
    cache, training = worker.sampling.engine._cache, worker.training
    weights = list(training.weights.parameters())
    engine = [p.to_local() if hasattr(p, "to_local") else p for p in worker.sampling.engine.model.parameters()]
    return {
        "masters": bytes_of(weights),
        "gradients": bytes_of([weight.grad for weight in weights if weight.grad is not None]),
        "moments": bytes_of([value for state in training.optimizer.adamw.state.values() for value in state.values()]),
        "engine": bytes_of(engine),
        "kv_cache": 0 if cache is None else bytes_of([*cache.keys, *cache.values]),
        "packed": 0 if worker.sampling.engine._packed is None else len(worker.sampling.engine._packed),
    }


def held_in_phases(ranks: Ranks, folder: Path, config: Sections) -> tuple[dict[str, int], dict[str, int]]:
    with start_on_ranks(ranks, folder, config) as workers:
        rollouts = rollout(workers)
        with workers.train_phase() as trainer:
            trainer.update(rollouts, contrast(rollouts))
            training = held(workers)
        rollout(workers, step=2)
        with workers.rollout_phase() as engine:  # again, with nothing in between, as after an evaluation
            engine.generate(prompts_of(workers), n=2, max_response_length=8, step=2)
            sampling = held(workers)
    return training, sampling


@pytest.mark.parametrize("size", [1, 2])
def test_a_phase_holds_what_it_needs_and_nothing_else(ranks: RankProcesses, tmp_path: Path, size: int) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    whole = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    config = {"trainer": {"offload": "disk"}, "model": {"dtype": "bfloat16"}}
    for training, sampling in ranks.run(held_in_phases, size, folder, config):
        assert training["masters"] == pytest.approx(whole / size, rel=0.1)
        assert training["moments"] == pytest.approx(2 * whole / size, rel=0.1)
        assert training["kv_cache"] == training["packed"] == 0
        scalars = 4 * 30  # AdamW's counters of updates stay
        assert sampling["moments"] < scalars
        assert sampling["gradients"] == training["gradients"] == 0
        assert sampling["kv_cache"] > 0
        assert sampling["engine"] > whole / 4
        assert sampling["masters"] == (0 if size > 1 else pytest.approx(0, abs=whole / 3))  # the head is its own master
        if size > 1:
            assert training["engine"] == 0


def responses_to(ranks: Ranks, folder: Path, config: Sections, count: int) -> list[tuple[int, str]]:
    with start_on_ranks(ranks, folder, config) as workers, workers.rollout_phase() as engine:
        rollouts = engine.generate(prompts_of(workers)[:count], n=1, max_response_length=6, step=1)
    return list(zip(rollouts.group_ids.tolist(), rollouts.texts, strict=True))


@pytest.mark.parametrize("count", [1, 3])
def test_fault_30_each_prompt_is_answered_once_however_few_there_are(
    ranks: RankProcesses, tmp_path: Path, count: int
) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    [expected] = ranks.run(responses_to, 1, folder, {}, count)
    assert [group for group, _ in expected] == list(range(count))
    for config in ({}, {"rollout": {"tensor_parallel": 2}}):
        assert ranks.run(responses_to, 4, folder, config, count) == [expected] * 4


def gap_of_a_model_with_buffers(ranks: Ranks, folder: Path, model: str) -> float:
    with start_on_ranks(ranks, folder, {}) as workers:
        rollouts = rollout(workers)
        with workers.train_phase():
            gap = (trainer_logprobs(workers, rollouts) - rollouts.rollout_logprobs)[rollouts.response_mask].abs().max()
        assert type(workers._group.call(_policy_model)).__name__.endswith(model)
    return float(gap)


def _policy_model(worker: Worker) -> object:
    return worker.training.policy.model


def test_buffers_that_files_hold_reach_the_engine(ranks: RankProcesses, tmp_path: Path) -> None:
    """GLM-4-MoE routes by a bias that is no parameter."""
    model = "Glm4MoeForCausalLM"
    folder = glm_with_a_bias(tmp_path / "model")
    for size in (1, 2):
        assert max(ranks.run(gap_of_a_model_with_buffers, size, folder, model)) < TOLERANCE


def glm_with_a_bias(folder: Path) -> Path:
    """A tiny one whose bias turns the choice of experts around."""
    tokenizer = tiny_tokenizer()
    fields = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "moe_intermediate_size": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "vocab_size": -(-len(tokenizer) // 8) * 8, "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.1,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **fields))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([3.0, -3.0, 2.0, -2.0]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model_of(ranks: Ranks, folder: Path) -> str:
    with start_on_ranks(ranks, folder, {}) as workers:
        try:
            return str(type(workers.model))
        except ClusterError as error:
            return str(error)


def test_no_rank_has_the_model(ranks: RankProcesses, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    for message in ranks.run(model_of, 2, folder):
        assert "spread over 2 workers" in message
        assert "num_workers=1" in message
