"""Adapters in one process: what is trained, what it costs, and what they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tandem as td
from tandem.errors import ModelError
from tests.tiny import tiny_model_folder
from tests.unit.hybrid.made import contrast, rollout, start_tiny, trainer_logprobs, worker_of

Sections = Mapping[str, Mapping[str, Any]]


def started(folder: Path, config: Sections | None = None) -> td.Workers:
    """Workers with adapters on the tiny model in `folder`, which is made unless it is there."""
    config = config or {}
    return start_tiny(folder, config={**config, "model": {"lora_rank": 4, **config.get("model", {})}})


def gradient(workers: td.Workers, rollouts: td.Rollouts) -> dict[str, Tensor]:
    """That of one update, from the first moments, which `betas` make equal to it."""
    with workers.train_phase() as trainer:
        reference = trainer.ref_logprobs(rollouts)
        trainer.update(rollouts, contrast(rollouts), ref_logprobs=reference, loss=td.ClippedSurrogate(kl_coef=0.1))
    training = worker_of(workers).training
    return {
        name: training.optimizer.adamw.state[shard.tensor]["exp_avg"].clone()
        for name, shard in training.weights.shards().items()
    }


@torch.no_grad()
def move_adapters(workers: td.Workers) -> None:
    """Away from B = 0, where A has no gradient."""
    generator = torch.Generator().manual_seed(3)
    for shard in worker_of(workers).training.weights.shards().values():
        shard.tensor.add_(torch.randn(shard.shape, generator=generator), alpha=0.02)


ONE_GRADIENT: Sections = {"trainer": {"betas": [0.0, 0.999], "max_grad_norm": 1e9, "packing": "none"}}
CUTS: Mapping[str, Mapping[str, Any]] = {
    "shared_prefix": {"packing": "shared_prefix"},
    "varlen": {"packing": "varlen"},
    "micro_batches": {"packing": "varlen", "micro_batch_tokens": 64},
    "chunked_head": {"packing": "varlen", "logits_chunk_tokens": 5},
    "activation_checkpointing": {"packing": "varlen", "activation_checkpointing": True},
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, td.Rollouts, dict[str, Tensor]]:
    """A model, rollouts, and the adapters' gradient when each sequence runs on its own."""
    folder = tmp_path_factory.mktemp("lora") / "model"
    with started(folder, ONE_GRADIENT) as workers:
        move_adapters(workers)
        rollouts = rollout(workers)
        return folder, rollouts, gradient(workers, rollouts)


@pytest.mark.parametrize("cut", CUTS)
def test_the_gradient_does_not_depend_on_how_the_rows_are_run(
    expected: tuple[Path, td.Rollouts, dict[str, Tensor]], cut: str
) -> None:
    """Contract 2: 1e-5 of its norm."""
    folder, rollouts, whole = expected
    with started(folder, {"trainer": {**ONE_GRADIENT["trainer"], **CUTS[cut]}}) as workers:
        move_adapters(workers)
        found = gradient(workers, rollouts)
    assert found.keys() == whole.keys()
    assert all(float(each.abs().max()) > 0 for each in whole.values()), "A and B of every layer"
    off = torch.cat([(found[name] - whole[name]).flatten() for name in whole]).norm()
    assert float(off) < 1e-5 * float(torch.cat([each.flatten() for each in whole.values()]).norm())


def test_in_bfloat16_adapters_have_float32_masters_and_the_base_has_neither_masters_nor_moments(
    tmp_path: Path,
) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    with started(folder, {"model": {"dtype": "bfloat16"}, "trainer": {"lr": 1e-6}}) as workers:
        training = worker_of(workers).training
        frozen = {name: each for name, each in workers.model.named_parameters() if not each.requires_grad}
        before = {name: each.clone() for name, each in frozen.items()}
        masters = {name: shard.tensor.detach().clone() for name, shard in training.weights.shards().items()}
        assert {each.dtype for name, each in frozen.items() if "embed" not in name} == {torch.bfloat16}
        assert frozen["model.embed_tokens.weight"].dtype == torch.float32, "it is the head as well"
        assert {each.dtype for each in masters.values()} == {torch.float32}
        rollouts = rollout(workers)
        with workers.train_phase() as trainer:
            update = trainer.update(rollouts, contrast(rollouts))
        assert update.grad_norm > 0
        assert all(torch.equal(each, before[name]) for name, each in frozen.items())
        now = training.weights.shards()
        moved = [name for name, master in masters.items() if not torch.equal(now[name].tensor, master)]
        assert all(".lora_B." in name for name in moved), "A has no gradient yet"
        assert len(moved) == 14, "an update of 1e-6, which bfloat16 would swallow for most values"
        for name, shard in training.weights.shards().items():
            assert torch.equal(workers.model.get_parameter(name), shard.tensor.bfloat16())
        assert training.optimizer.adamw.state.keys() == {shard.tensor for shard in training.weights.shards().values()}


def test_the_reference_is_the_base_itself_unless_another_one_is_given(tmp_path: Path) -> None:
    folder, other = tiny_model_folder(tmp_path / "model"), tiny_model_folder(tmp_path / "other", seed=1)
    with start_tiny(folder) as workers:
        rollouts = rollout(workers)
        of_base = trainer_logprobs(workers, rollouts)
    with start_tiny(other) as workers:
        of_other = trainer_logprobs(workers, rollouts)
    for given, expected, is_loaded in ((None, of_base, False), (folder, of_base, False), (other, of_other, True)):
        config = {} if given is None else {"algorithm": {"reference": str(given), "kl_coef": 0.1}}
        with started(folder, config) as workers:
            move_adapters(workers)
            with workers.train_phase() as trainer:
                for _ in range(2):
                    assert torch.equal(trainer.ref_logprobs(rollouts), expected)
                assert not torch.equal(trainer_logprobs(workers, rollouts), of_base)
            assert (worker_of(workers).training.reference is not None) == is_loaded


def test_an_export_is_a_whole_model_with_tied_tensors_once(tmp_path: Path) -> None:
    with started(tmp_path / "model", {"model": {"lora_targets": ["q_proj", "up_proj"]}}) as workers:
        move_adapters(workers)
        rollouts = rollout(workers)
        expected = trainer_logprobs(workers, rollouts)
        workers.export(tmp_path / "export")
    base, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "export"))
    assert exported.keys() == base.keys()
    changed = {name.split(".")[-2] for name in base if not torch.equal(base[name], exported[name])}
    assert changed == {"q_proj", "up_proj"}
    with start_tiny(tmp_path / "export") as workers:
        torch.testing.assert_close(trainer_logprobs(workers, rollouts), expected, rtol=0, atol=2e-5)


def test_adapters_on_a_model_that_is_nowhere_can_be_trained_but_not_saved(tmp_path: Path) -> None:
    new = {"architecture": "Qwen3ForCausalLM", "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16,
           "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
    model = {"new": new, "tokenizer": {"characters": "0123456789+= "}, "lora_rank": 2}
    lengths = {"data": {"max_prompt_length": 16}, "rollout": {"max_response_length": 16, "max_concurrent": 8}}
    with td.start(lr=1e-2, config={"model": model, "cluster": {"threads": 1}, **lengths}) as workers:
        with workers.rollout_phase() as engine:
            prompt = td.Prompt(tuple(workers.tokenizer.encode("1+2=")), "1+2=")
            rollouts = engine.generate([prompt], n=4, max_response_length=4, step=1)
        with workers.train_phase() as trainer:
            assert trainer.update(rollouts, contrast(rollouts)).grad_norm > 0
        with pytest.raises(ModelError, match="this one has no files of its own"):
            workers.export(tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_critic_begins_with_the_base(tmp_path: Path) -> None:
    with started(tmp_path / "model", {"algorithm": {"advantage": "gae"}}) as workers:
        move_adapters(workers)
        rollouts = rollout(workers)
        with workers.train_phase() as trainer:
            values = trainer.values(rollouts)
        assert values is not None
        assert float(values.abs().max()) == 0.0
        critic = worker_of(workers).training.critic
        assert critic is not None
        shards = {name: shard.tensor for name, shard in critic.weights.shards().items()}
    base = load_file(tmp_path / "model" / "model.safetensors")
    assert len(base.keys() & shards.keys()) == len(base)
    assert all(torch.equal(shards[name], tensor) for name, tensor in base.items())
