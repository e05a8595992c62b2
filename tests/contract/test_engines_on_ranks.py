"""The contract on several ranks: each with a copy of the weights, or a slice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.model.ranks import Ranks
from tests.contract.engines import TOLERANCE, each_engine, folder_of, gap, start_with, with_engine
from tests.ranks import RankProcesses
from tests.unit.hybrid.made import prompts_of, rollout, trainer_logprobs
from tests.unit.hybrid.on_ranks import start_on_ranks


def gaps_and_texts(ranks: Ranks, engine: str, folder: Path, tensor_parallel: int) -> tuple[list[float], list[str]]:
    """Largest gap between engine and trainer: before any update, after one, after a huge one; and what was written."""
    config = with_engine(engine, {"rollout": {"tensor_parallel": tensor_parallel}})
    gaps, texts = [], []
    with start_on_ranks(ranks, folder, config) as workers:
        for lr in (1e-3, 0.3, 0.0):
            rollouts = rollout(workers)
            texts += rollouts.texts
            logprobs = trainer_logprobs(workers, rollouts)
            gaps.append(gap(workers, rollouts))
            if lr:
                with workers.train_phase() as trainer:
                    trainer.supervised_update([[5, 6, 7]], [[8, 9, 1]], lr=lr)
                moved = float((trainer_logprobs(workers, rollouts) - logprobs).abs().max())
                assert moved > (1.0 if lr > 0.1 else 1e-3), "hardly moved: old weights would not be seen"
    if engine == "vllm":
        forget_process_group()
    return gaps, texts


def forget_process_group() -> None:
    """The processes of the fixture join one group after the other; vLLM is made for one in the life of a process.

    Several of these tests run in the same processes, so that it is seen here whether this still does it.
    """
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


@each_engine
@pytest.mark.parametrize(
    ("tensor_parallel", "architecture", "tie"),
    [(1, "Qwen3ForCausalLM", True), (2, "Qwen3ForCausalLM", False), (2, "Qwen3MoeForCausalLM", True)],
    ids=["copies", "untied", "tied-experts"],
)
def test_fault_25_26_logprobs_are_the_trainers_on_ranks(
    ranks: RankProcesses, tmp_path: Path, engine: str, tensor_parallel: int, architecture: str, tie: bool
) -> None:
    folder = folder_of(tmp_path / "model", architecture, tie=tie)
    found = ranks.run(gaps_and_texts, 2, engine, folder, tensor_parallel)
    assert max(max(gaps) for gaps, _ in found) < TOLERANCE
    assert found[0][1] == found[1][1], "all ranks see all responses"
    with start_with(engine, folder) as workers:
        alone = list(rollout(workers).texts)
    written = found[0][1][: len(alone)]
    same = sum(one == other for one, other in zip(alone, written, strict=True))
    assert same >= 0.9 * len(alone), "last bits may flip a token, no more"


def responses_to_one_prompt(ranks: Ranks, engine: str, folder: Path) -> int:
    with start_on_ranks(ranks, folder, with_engine(engine, {})) as workers, workers.rollout_phase() as phase:
        number = len(phase.generate(prompts_of(workers)[:1], n=3, step=1))
    if engine == "vllm":
        forget_process_group()
    return number


@each_engine
def test_fault_30_a_rank_without_a_prompt_has_nothing_to_do(ranks: RankProcesses, tmp_path: Path, engine: str) -> None:
    assert ranks.run(responses_to_one_prompt, 2, engine, folder_of(tmp_path / "model")) == [3, 3]
