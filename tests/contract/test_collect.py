"""Sampled responses, further draws and greedy baselines come from either engine, in one phase."""

from __future__ import annotations

from pathlib import Path

import tandem as td
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.reward import RewardConfig
from tests.contract.engines import each_engine, folder_of, start_with

REWARD = """
def score(response):
    return sum(map(ord, response)) % 2
"""
LENGTH = 6


@each_engine
def test_one_phase_samples_draws_again_and_decodes_greedily(engine: str, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    config = RewardConfig(function=f"{tmp_path / 'reward.py'}:score", workers=1)
    rows = [{"prompt": f"{number}+{number}=", "ground_truth": ""} for number in range(4)]
    with start_with(engine, folder_of(tmp_path / "model")) as workers, td.start_rewards(config) as pool:
        prompts = td.Prompts(rows, workers.tokenizer, per_step=2)
        with workers.rollout_phase() as phase:
            options = phase.options(step=1, n=2, max_response_length=LENGTH)
            resample = AlgorithmConfig(idle_groups="resample", max_resample=4)
            rollouts, rewards = td.collect(phase, prompts, pool, options, resample)
            assert rewards.drawn is not None
            everything, batches = rewards.drawn.rollouts, rewards.drawn.num_batches
            assert len(everything.prompts) == 2 * batches
            again = phase.generate(everything.prompts, step=1, n=2, max_response_length=LENGTH)
            assert everything.texts == again.texts, "noise is that of the draw, whatever the batch"
            assert set(rollouts.texts) <= set(everything.texts)
            _, rewards = td.collect(phase, rollouts.prompts, pool, options, AlgorithmConfig(advantage="remax"))
            greedy = phase.generate(rollouts.prompts, step=7, n=1, temperature=0.0, max_response_length=LENGTH)
    assert rewards.baselines is not None
    assert rewards.baselines.tolist() == [float(sum(map(ord, text)) % 2) for text in greedy.texts for _ in range(2)]
