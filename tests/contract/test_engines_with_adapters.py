"""Adapters (LoRA) and the engines: adapted layers in the embedded one, merged weights in vLLM."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.model.ranks import Ranks
from tests.contract.engines import NEEDS_VLLM, each_engine, folder_of, start_with, with_engine
from tests.contract.test_engines_on_ranks import forget_process_group
from tests.ranks import RankProcesses
from tests.unit.hybrid.made import contrast, rollout, trainer_logprobs
from tests.unit.hybrid.test_lora_on_ranks import gaps, with_lora

TOLERANCE = 2e-5  # nats, contract 3, in float32


@each_engine
def test_fault_27_logprobs_are_the_trainers_at_step_0_and_after_updates(engine: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    with start_with(engine, folder) as workers:
        of_base = rollout(workers)
    with start_with(engine, folder, {"model": {"lora_rank": 4}}) as workers:
        for step in range(3):
            rollouts = rollout(workers, step=max(step, 1))
            before = trainer_logprobs(workers, rollouts)
            assert float((before - rollouts.rollout_logprobs)[rollouts.response_mask].abs().max()) < TOLERANCE
            if step == 0:  # B is zero: to the bit the base
                assert torch.equal(rollouts.response_tokens, of_base.response_tokens)
                assert torch.equal(rollouts.rollout_logprobs, of_base.rollout_logprobs)
            with workers.train_phase() as trainer:
                trainer.update(rollouts, contrast(rollouts))
            assert float((trainer_logprobs(workers, rollouts) - before).abs().max()) > 0.5, "hardly moved"


def gaps_with_vllm(ranks: Ranks, folder: Path) -> list[float]:
    config = with_engine("vllm", {"rollout": {"tensor_parallel": 2}})
    found = gaps(ranks, folder, with_lora(folder, config))
    forget_process_group()
    return found


@NEEDS_VLLM
def test_fault_27_vllm_on_two_ranks_gets_merged_weights(ranks: RankProcesses, tmp_path: Path) -> None:
    """The embedded engine on ranks: tests/unit/hybrid/test_lora_on_ranks.py."""
    for found in ranks.run(gaps_with_vllm, 2, folder_of(tmp_path / "model")):
        assert max(found) < TOLERANCE
