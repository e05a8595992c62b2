"""vLLM on a GPU: it gives its memory back while it sleeps, gets weights anew, and samples from the trainer's policy.

Where it is not installed beside the GPU, these tests say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tandem as td
from tandem.hybrid.vllm_weights import VllmWeights
from tests.contract.engines import LENGTHS, MAX_RESPONSE_LENGTH, NEEDS_VLLM
from tests.tiny import tiny_model_folder
from tests.unit.hybrid.made import rollout, trainer_logprobs, worker_of

pytestmark = [pytest.mark.gpu, NEEDS_VLLM]

CACHE_BYTES = 1 << 30
SIZE = {"head_dim": 64, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
MEAN_GAP = 0.05  # nats; bfloat16 rounds each product


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[td.Workers]:
    """With CUDA graphs, which must outlive sleep and new weights."""
    config = {
        "data": LENGTHS,
        "model": {"dtype": "bfloat16"},
        "cluster": {"device": "cuda"},
        "rollout": {
            "engine": "vllm",
            "max_concurrent": 8,
            "max_response_length": MAX_RESPONSE_LENGTH,
            "kv_cache_gib": CACHE_BYTES / 2**30,
        },
    }
    folder = tiny_model_folder(tmp_path / "model", scale=1.0, overrides=SIZE)
    with td.start(folder, lr=1e-2, config=config) as workers:
        yield workers


def sampling_of(workers: td.Workers) -> VllmWeights:
    sampling = worker_of(workers).sampling
    assert isinstance(sampling, VllmWeights)
    return sampling


def mean_gap(workers: td.Workers, rollouts: td.Rollouts) -> float:
    gaps = (trainer_logprobs(workers, rollouts) - rollouts.rollout_logprobs)[rollouts.response_mask]
    return float(gaps.abs().mean())


def forget_positions(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if "cos_sin_cache" in name:
            buffer.zero_()


def test_asleep_it_gives_weights_and_cache_back(workers: td.Workers) -> None:
    """At level 2, time after time. PyTorch counts what vLLM has given back, so the device is asked."""
    assert not sampling_of(workers).engine.keeps_weights
    for _ in range(3):
        with workers.rollout_phase():
            free_awake, _ = torch.cuda.mem_get_info()
        free_asleep, _ = torch.cuda.mem_get_info()
        assert free_asleep - free_awake > 0.9 * CACHE_BYTES


def test_fault_25_logprobs_are_the_trainers_after_sleep_and_updates(workers: td.Workers) -> None:
    """Before any update, after an ordinary one, after a huge one, and after a sleep without one."""
    for lr in (1e-3, 0.1, None):
        rollouts = rollout(workers)
        assert mean_gap(workers, rollouts) < MEAN_GAP
        if lr:
            before = trainer_logprobs(workers, rollouts)
            with workers.train_phase() as trainer:
                trainer.supervised_update([[5, 6, 7]], [[8, 9, 1]], lr=lr)
            moved = float((trainer_logprobs(workers, rollouts) - before).abs().max())
            assert moved > 10 * MEAN_GAP, "hardly moved: old weights would not be seen"
    assert mean_gap(workers, rollout(workers)) < MEAN_GAP
    assert not sampling_of(workers).engine.keeps_weights, "level 2 has done it"


def test_what_a_sleep_does_not_bring_back_makes_it_sleep_at_level_1(
    workers: td.Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables of positions, which no weights put right: a new engine has them, and from then on keeps its weights."""
    rollout(workers)
    sampling = sampling_of(workers)
    with workers.rollout_phase():
        sampling.engine._llm.apply_model(forget_positions)
    assert mean_gap(workers, rollout(workers)) < MEAN_GAP
    assert sampling.engine.keeps_weights
    captured = capsys.readouterr()
    assert "level 1" in captured.out + captured.err
    assert mean_gap(workers, rollout(workers)) < MEAN_GAP, "weights that were kept"
    with workers.train_phase() as trainer:
        trainer.supervised_update([[5, 6, 7]], [[8, 9, 1]], lr=1e-2)
    assert mean_gap(workers, rollout(workers)) < MEAN_GAP, "weights that were sent"
