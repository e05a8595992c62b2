"""Groups without contrast are put aside and others drawn; long responses pay; greedy responses are baselines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

import tandem as td
from tandem.batch import Drawn
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.reward import RewardConfig
from tandem.observe.step_metrics import step_metrics
from tandem.rewards.pool import RewardPool
from tests.unit.hybrid.made import start_tiny
from tests.unit.observe.made import made_update

RESAMPLE = AlgorithmConfig(idle_groups="resample", max_resample=3)
REMAX = AlgorithmConfig(advantage="remax")
LENGTH = 6


# The ground truth says which rewards a group gets. In a file: a function of this module would be imported with torch.
REWARD = """
def parity(response):
    return sum(map(ord, response)) % 2

def score(response, ground_truth):
    kind, _, text = ground_truth.partition(":")
    if kind == "raises" or (kind == "all but" and response == text):
        raise ValueError("no reward for this one")
    return {
        "mixed": parity(response),
        "right": 1.0,
        "wrong": 0.0,
        "third": 1 / 3,
        "none": None,
        "ended": float(len(response) < 6),
        "no small letter": None if response[:1].islower() else parity(response),
        "all but": 1.0 + parity(response),
    }[kind]
"""


def parity(response: str) -> float:
    """A reward that differs within any group of eight, or as good as."""
    return float(sum(map(ord, response)) % 2)


@dataclass(frozen=True)
class Tiny:
    """Workers and what scores their responses, for all tests of the module."""

    workers: td.Workers
    pool: RewardPool

    def collect(
        self,
        prompts: td.Prompts | Sequence[td.Prompt],
        algorithm: AlgorithmConfig | None = RESAMPLE,
        reward: RewardConfig | None = None,
        *,
        n: int = 8,
    ) -> tuple[td.Rollouts, td.Rewards]:
        with self.workers.rollout_phase() as engine:
            options = engine.options(step=1, n=n, max_response_length=LENGTH)
            return td.collect(engine, prompts, self.pool, options, algorithm, reward)

    def generate(self, prompts: Sequence[td.Prompt], *, n: int = 8, temperature: float = 1.0) -> td.Rollouts:
        with self.workers.rollout_phase() as engine:
            return engine.generate(prompts, step=1, max_response_length=LENGTH, n=n, temperature=temperature)

    def stream(self, truths: Sequence[str], per_step: int = 4) -> td.Prompts:
        rows = [{"prompt": f"{number}+{number}=", "ground_truth": truth} for number, truth in enumerate(truths)]
        return td.Prompts(rows, self.workers.tokenizer, per_step=per_step, shuffle=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "reward.py").write_text(REWARD)
    with td.start_rewards(RewardConfig(function=f"{folder / 'reward.py'}:score", workers=1)) as pool:
        yield Tiny(start_tiny(folder / "model"), pool)


def ids(rollouts: td.Rollouts) -> list[int]:
    return [prompt.prompt_id for prompt in rollouts.prompts]


def drawn_of(rewards: td.Rewards) -> Drawn:
    assert rewards.drawn is not None
    return rewards.drawn


TRUTHS = ("mixed", "right", "wrong", "mixed", "third", "mixed", "mixed", "mixed", "right", "right", "right", "right")


def test_groups_without_contrast_are_put_aside_and_others_drawn_until_the_batch_is_full(tiny: Tiny) -> None:
    prompts = tiny.stream(TRUTHS)
    rollouts, rewards = tiny.collect(prompts)
    assert ids(rollouts) == [0, 3, 5, 6], "the first ones with contrast, in the order of the draws"
    assert rollouts.group_ids.tolist() == [group for group in range(4) for _ in range(8)]
    drawn = drawn_of(rewards)
    assert ids(drawn.rollouts) == list(range(8)), "and no third batch"
    assert (drawn.num_batches, drawn.num_idle, drawn.num_surplus, drawn.num_missing) == (2, 3, 1, 0)
    assert bool((td.grpo_advantages(rewards.values, rollouts.group_ids).view(4, 8) != 0).any(dim=1).all())


def test_what_is_kept_is_what_the_engine_writes_for_these_prompts(tiny: Tiny) -> None:
    rollouts, rewards = tiny.collect(tiny.stream(TRUTHS))
    alone = tiny.generate(rollouts.prompts)
    assert rollouts.texts == alone.texts
    assert torch.equal(rollouts.response_tokens, alone.response_tokens)
    assert torch.allclose(rollouts.rollout_logprobs, alone.rollout_logprobs, atol=2e-5)  # other neighbours: last bits
    assert rewards.values.tolist() == [parity(text) for text in rollouts.texts]


def test_a_full_batch_draws_once(tiny: Tiny) -> None:
    prompts = tiny.stream(["mixed"] * 4)
    rollouts, rewards = tiny.collect(prompts)
    assert ids(rollouts) == [0, 1, 2, 3]
    assert (drawn_of(rewards).num_batches, drawn_of(rewards).num_idle) == (1, 0)
    assert prompts.epoch == 1.0


def test_max_resample_is_the_bound_and_the_step_goes_on_with_what_it_has(tiny: Tiny) -> None:
    prompts = tiny.stream(["right", "mixed", "wrong", "right"])
    rollouts, rewards = tiny.collect(prompts, AlgorithmConfig(idle_groups="resample", max_resample=2))
    assert ids(rollouts) == [1, 5], "the same row, drawn twice"
    drawn = drawn_of(rewards)
    assert (drawn.num_batches, drawn.num_idle, drawn.num_surplus, drawn.num_missing) == (2, 6, 0, 2)
    assert len(rewards.values) == len(rollouts) == 16
    assert prompts.epoch == 2.0


def test_fault_19_without_any_contrast_the_first_batch_goes_on_as_it_is(tiny: Tiny) -> None:
    rollouts, rewards = tiny.collect(tiny.stream(["right", "wrong", "none", "raises"]))
    assert ids(rollouts) == [0, 1, 2, 3]
    drawn = drawn_of(rewards)
    assert (drawn.num_batches, drawn.num_idle, drawn.num_surplus, drawn.num_missing) == (3, 8, 0, 4)
    assert bool((td.grpo_advantages(rewards.values, rollouts.group_ids, valid=rewards.valid) == 0).all())
    assert rewards.num_invalid == 16


def test_fault_3_and_32_groups_of_fewer_than_two_valid_rewards_have_no_contrast_and_are_told_of(
    tiny: Tiny,
) -> None:
    first, last = "mixed", "mixed"
    rollouts, rewards = tiny.collect(tiny.stream([first, "raises", "none", last], per_step=2))
    assert ids(rollouts) == [0, 3]
    assert bool(rewards.valid.all())
    assert rewards.problems == {}
    drawn = drawn_of(rewards)
    assert drawn.rewards.num_invalid == 16
    assert "no reward for this one" in drawn.rewards.problems[8]
    assert "returned None" in drawn.rewards.problems[16]


def test_a_prompt_drawn_twice_in_one_step_gets_other_responses(tiny: Tiny) -> None:
    """Each draw has an id of its own, and so other noise: a second look at a prompt, not a copy of the first."""
    rollouts, _ = tiny.collect(tiny.stream(["mixed", "right"], per_step=2))
    assert rollouts.prompts[0].text == rollouts.prompts[1].text
    assert ids(rollouts) == [0, 2]
    assert rollouts.texts[:8] != rollouts.texts[8:]


def test_fault_6_responses_that_are_masked_make_no_contrast(tiny: Tiny) -> None:
    """All that were cut off are wrong, all others right: with those masked there is nothing to compare."""

    prompts = tiny.stream(["ended"] * 4)
    _, rewards = tiny.collect(prompts)
    assert drawn_of(rewards).num_idle < 4, "some response ends by itself"
    masked = AlgorithmConfig(idle_groups="resample", max_resample=1, mask_truncated=True)
    _, rewards = tiny.collect(tiny.stream(["ended"] * 4), masked)
    assert drawn_of(rewards).num_missing == 4


def test_to_resample_there_must_be_a_stream(tiny: Tiny) -> None:
    batch = tiny.stream(["mixed"] * 4).next_batch()
    with pytest.raises(ValueError, match="draws more prompts: give the stream"):
        tiny.collect(batch)


def test_the_stream_goes_on_after_all_that_was_drawn_and_so_does_a_resumed_one(tiny: Tiny) -> None:
    prompts = tiny.stream(TRUTHS)
    tiny.collect(prompts)
    resumed = tiny.stream(TRUTHS)
    resumed.load_state_dict(json.loads(json.dumps(prompts.state_dict())))
    following = resumed.next_batch()
    assert [prompt.prompt_id for prompt in following] == [8, 9, 10, 11]
    assert following == prompts.next_batch()


def test_long_responses_lose_reward_and_the_rewards_as_given_are_kept(tiny: Tiny) -> None:
    price = RewardConfig(overlong_buffer=4, overlong_penalty=0.5)
    rollouts, rewards = tiny.collect(tiny.stream(["no small letter"] * 4), None, price)
    raw = drawn_of(rewards).rewards
    assert torch.equal(raw.valid, rewards.valid)
    assert 0 < rewards.num_invalid < 32
    lost = [0.5 * max(0, length - 2) / 4 for length in rollouts.response_lengths.tolist()]
    assert len(set(lost)) > 1
    for row, text in enumerate(rollouts.texts):
        assert float(raw.values[row]) == (parity(text) if rewards.valid[row] else 0.0)
        assert float(rewards.values[row]) == (float(raw.values[row]) - lost[row] if rewards.valid[row] else 0.0)
    metrics = step_metrics(rollouts, rewards, made_update())
    assert metrics["reward/mean"] == pytest.approx(raw.mean)
    assert metrics["reward/mean_kept"] == pytest.approx(rewards.mean)
    assert metrics["reward/mean_kept"] < metrics["reward/mean"]


def test_length_alone_makes_no_contrast(tiny: Tiny) -> None:
    """DAPO asks whether some answers are right and some wrong (3.2, equation 11), before it prices length (3.4)."""
    price = RewardConfig(overlong_buffer=4)
    rollouts, rewards = tiny.collect(tiny.stream(["right", "mixed"], per_step=1), RESAMPLE, price)
    assert ids(rollouts) == [1]
    assert ids(drawn_of(rewards).rollouts) == [0, 1]


def test_metrics_tell_of_all_that_was_drawn_and_of_what_is_kept(tiny: Tiny) -> None:
    rollouts, rewards = tiny.collect(tiny.stream(TRUTHS))
    metrics = step_metrics(rollouts, rewards, made_update())
    everything = drawn_of(rewards)
    assert metrics["reward/mean"] == pytest.approx(float(everything.rewards.values.mean()))
    assert metrics["reward/mean_kept"] == pytest.approx(float(rewards.values.mean()))
    assert metrics["reward/mean"] != pytest.approx(metrics["reward/mean_kept"], abs=1e-3)
    assert metrics["rollout/batches"] == 2
    assert metrics["rollout/groups_resampled"] == metrics["rollout/groups_without_contrast"] == 3
    assert metrics["rollout/groups_surplus"] == 1


def test_remax_scores_the_greedy_response_to_each_prompt(tiny: Tiny) -> None:
    prompts = tiny.stream(["mixed"] * 4).next_batch()
    rollouts, rewards = tiny.collect(prompts, REMAX, n=2)
    greedy = tiny.generate(prompts, n=1, temperature=0.0)
    assert rewards.baselines is not None
    assert rewards.baselines.tolist() == [parity(text) for text in greedy.texts for _ in range(2)]
    assert len(rollouts) == 8, "greedy responses are not learnt from"
    assert rollouts.texts == tiny.generate(prompts, n=2).texts
    assert rewards.drawn is None


def test_a_group_whose_greedy_response_has_no_reward_is_not_valid(tiny: Tiny) -> None:
    prompts = tiny.stream(["mixed"] * 4).next_batch()
    unlucky = tiny.generate(prompts, n=1, temperature=0.0).texts[2]

    prompts = [replace(prompt, ground_truth=f"all but:{unlucky}") for prompt in prompts]
    rollouts, rewards = tiny.collect(prompts, REMAX, n=2)
    assert unlucky not in rollouts.texts
    assert rewards.valid.tolist() == [True] * 4 + [False] * 2 + [True] * 2
    assert rewards.values[4:6].tolist() == [0.0, 0.0]
    assert set(rewards.problems) == {4, 5}
    assert "the greedy response to the same prompt, to compare it with, has no reward" in rewards.problems[4]
    assert "no reward for this one" in rewards.problems[4]
    assert rewards.baselines is not None
    assert [math.isnan(value) for value in rewards.baselines.tolist()] == [not valid for valid in rewards.valid]
    assert step_metrics(rollouts, rewards, made_update())["reward/invalid"] == 2


def test_greedy_responses_pay_for_their_length_too(tiny: Tiny) -> None:
    prompts = tiny.stream(["right"] * 4).next_batch()
    lengths = tiny.generate(prompts, n=1, temperature=0.0).response_lengths.tolist()
    _, rewards = tiny.collect(prompts, REMAX, RewardConfig(overlong_buffer=5), n=1)
    assert rewards.baselines is not None
    assert rewards.baselines.tolist() == pytest.approx([1.0 - max(0, length - 1) / 5 for length in lengths])
    raw = drawn_of(rewards).rewards.baselines
    assert raw is not None
    assert raw.tolist() == [1.0] * 4
