from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

import tandem as td
from tandem.sft import _batches
from tests.tiny import write_jsonl
from tests.unit.hybrid.made import config_of, rollout, start_tiny, worker_of

ANSWERS = [{"prompt": f"{letter}=", "response": letter.upper()} for letter in "abcdefgh"]


def test_after_a_warm_start_the_policy_gives_the_answers_and_the_moments_are_forgotten(tmp_path: Path) -> None:
    workers = start_tiny(tmp_path / "model")
    answers = write_jsonl(tmp_path / "answers.jsonl", ANSWERS)
    config = config_of(sft={"train": answers, "steps": 60, "batch_size": 8, "lr": 3e-3})
    td.warm_start(workers, config.sft, config.data)
    prompts = [td.Prompt(tuple(workers.tokenizer.encode(f"{letter}=")), letter) for letter in "abcdefgh"]
    with workers.rollout_phase() as engine:
        rollouts = engine.generate(prompts, n=1, max_response_length=4, temperature=0.0, step=0)
    assert rollouts.texts == tuple("ABCDEFGH")
    assert set(rollouts.finish_reasons) == {"stop"}, "EOS belongs to the answer"
    assert not worker_of(workers).training.optimizer.adamw.state
    assert workers.policy_version == 60


def test_without_steps_nothing_happens(tmp_path: Path) -> None:
    workers = start_tiny(tmp_path / "model")
    config = config_of()
    before = rollout(workers)
    td.warm_start(workers, config.sft, config.data)
    assert workers.policy_version == 0
    assert torch.equal(rollout(workers).rollout_logprobs, before.rollout_logprobs)


def test_every_answer_comes_once_per_epoch_in_batches_of_full_size() -> None:
    batches = list(_batches(10, 4, 5, seed=3))
    assert [len(rows) for rows in batches] == [4] * 5
    drawn = [row for rows in batches for row in rows]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    assert batches == list(_batches(10, 4, 5, seed=3))
    assert batches != list(_batches(10, 4, 5, seed=4))


def test_a_batch_may_be_larger_than_the_data() -> None:
    [rows] = _batches(3, 8, 1, seed=0)
    assert sorted(Counter(rows).values()) == [2, 3, 3]
