"""The check at every wake: vLLM with anything but the policy's weights does not get to answer."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import tandem as td
from tandem.errors import ModelError
from tandem.hybrid.vllm_weights import VllmWeights
from tests.contract.engines import NEEDS_VLLM, TOLERANCE, folder_of, gap, start_with
from tests.unit.hybrid.made import rollout, worker_of

pytestmark = NEEDS_VLLM
DIFFERENT = r"differ from the trainer's by .*rounding accounts for 0\.001 at most"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("models") / "model")


def change_a_norm(model: nn.Module) -> None:
    """One tensor of 64 numbers."""
    with torch.no_grad():
        model.get_parameter("model.layers.1.input_layernorm.weight").mul_(1.1)


def forget_positions(model: nn.Module) -> None:
    """What no file has: the tables of the rotary embedding."""
    tables = [buffer for name, buffer in model.named_buffers() if "cos_sin_cache" in name]
    assert tables
    for table in tables:
        table.zero_()


def test_fault_25_a_weight_that_is_not_the_policys_is_found(folder: Path) -> None:
    """Whether it went astray or was left from before; the next weights that are sent put it right."""
    with start_with("vllm", folder) as workers:
        rollout(workers)
        engine = worker_of(workers).sampling.engine
        engine._llm.apply_model(change_a_norm)
        with pytest.raises(ModelError, match=DIFFERENT):
            rollout(workers)
        with workers.train_phase() as trainer:
            trainer.supervised_update([[5, 6, 7]], [[8, 9, 1]], lr=1e-3)
        assert gap(workers, rollout(workers)) < TOLERANCE


def test_fault_26_in_bfloat16_a_head_of_the_policy_before_is_found(folder: Path) -> None:
    """Where the head's name is not sent: vLLM's CPU build has packed a copy of the tied tensor. One update old."""
    half = {"model": {"dtype": "bfloat16", "head_dtype": "bfloat16"}}
    with start_with("vllm", folder, half) as workers:
        rollout(workers)
        sampling = worker_of(workers).sampling
        assert isinstance(sampling, VllmWeights)
        before = [(name, tensor.clone()) for name, tensor in sampling._whole.read({})]
        with workers.train_phase() as trainer:
            trainer.supervised_update([[5, 6, 7]], [[8, 9, 1]], lr=0.06)
        rollout(workers)
        sampling.engine.load_weights(before)
        sampling.engine.load_weights(item for item in sampling._whole.read({}) if not item[0].startswith("lm_head."))
        with pytest.raises(
            ModelError, match=r"differ from the trainer's by 0\.[01]\d+ .*rounding accounts for 0\.04 at most"
        ):
            rollout(workers)


def test_what_no_weights_put_right_takes_a_new_engine(folder: Path) -> None:
    """It gets weights and answers as before; so does the engine of the next workers in this process."""
    with start_with("vllm", folder) as workers:
        before = rollout(workers)
        sampling = worker_of(workers).sampling
        assert isinstance(sampling, VllmWeights)
        forget_positions_in(workers)
        sampling.engine.restart(sleep_level=1)
        sampling._send()
        assert torch.equal(rollout(workers).rollout_logprobs, before.rollout_logprobs)
        forget_positions_in(workers)
    del workers, sampling
    gc.collect()
    with start_with("vllm", folder) as workers:
        assert torch.equal(rollout(workers).rollout_logprobs, before.rollout_logprobs)


def forget_positions_in(workers: td.Workers) -> None:
    worker_of(workers).sampling.engine._llm.apply_model(forget_positions)
    with pytest.raises(ModelError, match=DIFFERENT):
        rollout(workers)
