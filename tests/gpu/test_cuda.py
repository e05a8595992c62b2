"""The same path on a GPU: engine and trainer agree, an update changes the policy, noise is the CPU's to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tandem as td
from tandem.batch import Prompt
from tandem.rollout.noise import uniform_noise
from tests.tiny import tiny_model_folder

pytestmark = pytest.mark.gpu


def _prompts(workers: td.Workers) -> list[Prompt]:
    texts = ["12+7=", "a longer prompt", "x"]
    return [
        Prompt(tokens=tuple(workers.tokenizer(text)["input_ids"]), text=text, prompt_id=number)
        for number, text in enumerate(texts)
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_engine_and_trainer_agree_before_and_after_an_update(tmp_path: Path, dtype: str, tolerance: float) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    config = {"model": {"dtype": dtype}, "cluster": {"device": "cuda"}, "algorithm": {"old_logprobs": "recompute"}}
    workers = td.start(folder, lr=1e-2, config=config)
    for step in range(2):
        with workers.rollout_phase() as engine:
            rollouts = engine.generate(_prompts(workers), n=8, max_response_length=24, step=step)
        with workers.train_phase() as trainer:
            logprobs = trainer.old_logprobs(rollouts)
            assert logprobs is not None
            gap = (logprobs - rollouts.rollout_logprobs)[rollouts.response_mask].abs().max()
            assert gap < tolerance
            update = trainer.update(rollouts, torch.linspace(-1, 1, len(rollouts)), logprobs)
            assert update.num_updates == 1
    assert workers.policy_version == 2


def test_noise_is_that_of_the_cpu() -> None:
    ids = torch.arange(64)[:, None]
    positions = torch.arange(32)[None, :]
    on_cpu = uniform_noise(1, 2, ids, ids, positions)
    on_gpu = uniform_noise(1, 2, ids.cuda(), ids.cuda(), positions.cuda())
    assert torch.equal(on_cpu, on_gpu.cpu())
