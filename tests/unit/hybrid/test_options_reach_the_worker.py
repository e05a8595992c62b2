"""Options that change memory and speed, not results: seen where they act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tandem as td
from tandem.config.model import ModelConfig
from tandem.errors import ModelError, TrainingError
from tandem.hybrid.start import check_lengths
from tandem.hybrid.worker import Worker
from tandem.model.attention import NAMES
from tandem.model.facts import check_model
from tests.tiny import LONGROPE, tiny_model_folder
from tests.unit.hybrid.made import config_of, contrast, prompts_of, rollout, start_tiny, worker_of


def forward_sizes(workers: td.Workers, rollouts: td.Rollouts) -> list[int]:
    """Tokens of each forward pass of an update, recomputed ones included."""
    sizes: list[int] = []
    layer = workers.model.base_model.layers[0]
    hook = layer.input_layernorm.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[1]))
    with workers.train_phase() as trainer:
        trainer.update(rollouts, contrast(rollouts))
    hook.remove()
    return sizes


def head_sizes(workers: td.Workers, rollouts: td.Rollouts) -> list[int]:
    """Tokens of which logits are computed at once."""
    sizes: list[int] = []
    head = workers.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[0]))
    with workers.train_phase() as trainer:
        trainer.update(rollouts, contrast(rollouts))
    hook.remove()
    return sizes


def test_lengths_at_which_longrope_changes_all_positions_are_refused(tmp_path: Path) -> None:
    """Engine and trainer were more than a nat apart there."""
    folder = tiny_model_folder(tmp_path / "model", "Phi3ForCausalLM", overrides=LONGROPE)
    facts = check_model(ModelConfig(path=str(folder)))
    lengths = {"data": {"max_prompt_length": 16}, "rollout": {"max_response_length": 16}}
    check_lengths(config_of(**lengths), facts)
    lengths["rollout"]["max_response_length"] = 17
    with pytest.raises(ModelError, match=r"33 tokens together, but .* before its longrope .*\n  -> .* at most 32"):
        check_lengths(config_of(**lengths), facts)


@pytest.mark.parametrize(
    ("preset", "lr", "warmup_steps"),
    [(None, 1e-6, 0), ("reinforce_pp", 5e-7, 0), ("rloo", 1e-6, 18), ("ppo", 1e-6, 50)],
)
def test_a_preset_decides_what_start_was_not_told(
    tmp_path: Path, preset: str | None, lr: float, warmup_steps: int
) -> None:
    folder = tiny_model_folder(tmp_path / "model")

    def first_lr(lr: float | None, trainer: dict[str, Any] | None = None) -> float:
        config = {"algorithm": {"preset": preset}, "trainer": trainer or {}, "cluster": {"threads": 1}}
        with td.start(folder, lr=lr, config=config) as workers:
            return workers._train.schedule.at(1)

    assert first_lr(None) == pytest.approx(lr / max(1, warmup_steps))
    assert first_lr(0.1) == pytest.approx(0.1 / max(1, warmup_steps))
    assert first_lr(0.1, {"lr": 0.2, "warmup_steps": 2}) == pytest.approx(0.1)


def start_with(tmp_path: Path, section: str, **options: Any) -> td.Workers:
    return start_tiny(tmp_path / "model", config={section: options})


def test_micro_batch_tokens_bounds_the_tokens_of_a_pass(tmp_path: Path) -> None:
    rollouts = rollout(start_tiny(tmp_path / "model"))
    [whole] = forward_sizes(start_with(tmp_path, "trainer", packing="varlen"), rollouts)
    cut = forward_sizes(start_with(tmp_path, "trainer", packing="varlen", micro_batch_tokens=100), rollouts)
    assert max(cut) <= 100 < whole == sum(cut)


def test_packing_decides_how_often_a_prompt_is_run(tmp_path: Path) -> None:
    rollouts = rollout(start_tiny(tmp_path / "model"))
    prompts = sum(len(prompt.tokens) for prompt in rollouts.prompts)
    responses = int(rollouts.response_lengths.sum()) - len(rollouts)
    sizes = {
        packing: forward_sizes(start_with(tmp_path, "trainer", packing=packing), rollouts)
        for packing in ("shared_prefix", "varlen", "none")
    }
    assert sizes["shared_prefix"] == [prompts + responses]
    assert sizes["varlen"] == [4 * prompts + responses]
    assert len(sizes["none"]) == len(rollouts)
    assert sum(sizes["none"]) == 4 * prompts + responses


def test_logits_chunk_tokens_bounds_the_logits_in_memory(tmp_path: Path) -> None:
    rollouts = rollout(start_tiny(tmp_path / "model"))
    num_tokens = int(rollouts.response_lengths.sum())
    assert head_sizes(start_tiny(tmp_path / "model"), rollouts) == [num_tokens]
    chunks = head_sizes(start_with(tmp_path, "trainer", logits_chunk_tokens=10), rollouts)
    assert max(chunks) == 10
    assert sum(chunks) == 2 * num_tokens, "each chunk is run again in the backward pass"


def test_activation_checkpointing_runs_the_layers_again(tmp_path: Path) -> None:
    rollouts = rollout(start_tiny(tmp_path / "model"))
    once = forward_sizes(start_with(tmp_path, "trainer", activation_checkpointing=False), rollouts)
    twice = forward_sizes(start_with(tmp_path, "trainer", activation_checkpointing=True), rollouts)
    assert twice == 2 * once


def test_max_skipped_updates_stops_training(tmp_path: Path) -> None:
    workers = start_with(tmp_path, "trainer", max_skipped_updates=1)
    rollouts = rollout(workers)

    def infinite(*, logprobs: torch.Tensor, **_: object) -> torch.Tensor:
        return logprobs * torch.inf

    with workers.train_phase() as trainer:
        skipped = trainer.update(rollouts, contrast(rollouts), loss=infinite)
        assert (skipped.num_skipped, skipped.policy_version) == (1, 0)
        with pytest.raises(TrainingError, match="2 updates in a row"):
            trainer.update(rollouts, contrast(rollouts), loss=infinite)


def test_max_concurrent_decides_how_many_responses_are_written_at_once(tmp_path: Path) -> None:
    """Rows of a decoding step; a grid has at least eight. The responses are the same."""
    found, widest = {}, {}
    for max_concurrent in (8, 64):
        workers = start_with(tmp_path, "rollout", max_concurrent=max_concurrent)
        rows: list[int] = []
        layer = workers.model.base_model.layers[0]
        hook = layer.register_forward_hook(lambda _, inputs, __, rows=rows: rows.append(inputs[0].shape[0]))
        found[max_concurrent] = rollout(workers, n=8)
        hook.remove()
        widest[max_concurrent] = max(rows)
    assert widest == {8: 8, 64: 32}
    assert torch.equal(found[8].response_tokens, found[64].response_tokens)


def test_kv_cache_gib_bounds_the_cache_and_too_little_is_told(tmp_path: Path) -> None:
    workers = start_with(tmp_path, "rollout", max_concurrent=64, kv_cache_gib=1e-3)
    with workers.rollout_phase() as engine:
        engine.generate(prompts_of(workers), n=16, max_response_length=8, step=1)
        cache = worker_of(workers).sampling.engine._cache
        assert cache is not None
        assert cache.slots < 64
    tiny = start_with(tmp_path, "rollout", kv_cache_gib=1e-6)
    with pytest.raises(ModelError, match=r"rollout\.kv_cache_gib"):
        rollout(tiny)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_computed_as_the_config_says(tmp_path: Path, attention: str) -> None:
    workers = start_with(tmp_path, "model", attention=attention)
    assert workers.model.config._attn_implementation == NAMES[attention]


@pytest.mark.parametrize(("threads", "deterministic"), [(1, True), (2, False)])
def test_threads_and_determinism_hold_while_the_worker_works(tmp_path: Path, threads: int, deterministic: bool) -> None:
    def settings(_: Worker) -> tuple[int, bool]:
        return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()

    workers = start_with(tmp_path, "cluster", threads=threads, deterministic=deterministic)
    assert workers._group.call(settings) == (threads, deterministic)


def test_the_device_is_where_the_weights_are(tmp_path: Path) -> None:
    assert start_with(tmp_path, "cluster", device="cpu").model.device == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(td.ConfigError, match=r"cluster\.device"):
            start_with(tmp_path, "cluster", device="cuda")
