"""Scores as tensors: what has no value is marked; own numbers are averaged over the responses that have them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tandem as td
from tandem.algorithm.advantages import estimate_advantages
from tandem.batch import Prompt, Response, Rollouts
from tandem.collect import _Group, as_rewards, collect
from tandem.config.algorithm import AlgorithmConfig
from tandem.errors import RewardError
from tandem.hybrid.phases import Unwatched
from tandem.observe.step_metrics import groups_without_contrast
from tandem.rewards.pool import RewardPool
from tandem.rewards.sample import Sample, Score
from tests.unit.hybrid.made import config_of, prompts_of, rollout, start_tiny

REWARD = """
def score(response, prompt):
    if response[:1].isdigit():
        raise ValueError("a digit")
    return {"score": len(response) + len(prompt) / 100, "first": ord(response[:1] or " ")}
"""


class Watched(RewardPool):
    """A pool that notes when it is given something."""

    events: list[str]

    def submit(self, sample: Sample) -> int:
        self.events.append("submit")
        return super().submit(sample)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Watched]:
    (tmp_path / "reward.py").write_text(REWARD)
    config = config_of(reward={"function": f"{tmp_path / 'reward.py'}:score", "workers": 2})
    with Watched(config.reward) as pool:
        pool.events = []
        yield pool


def test_responses_are_scored_while_others_are_still_being_written(tmp_path: Path, pool: Watched) -> None:
    workers = start_tiny(tmp_path / "model")

    class Noted(Unwatched):
        @contextmanager
        def timing(self, name: str) -> Iterator[None]:
            pool.events.append(name)
            yield

    workers.watch = Noted()
    prompts = prompts_of(workers)
    with workers.rollout_phase() as engine:
        collect(engine, prompts, pool, engine.options(step=1, n=8, max_response_length=8))
    assert pool.events.count("submit") == 32
    last_wait_for_the_engine = len(pool.events) - 1 - pool.events[::-1].index("rollout")
    assert pool.events.index("submit") < last_wait_for_the_engine
    assert pool.events[-1] == "reward", "what is left to wait for is counted as reward"


def test_rewards_stand_in_the_order_of_the_rollouts(tmp_path: Path, pool: Watched) -> None:
    """Responses end in another order than they are numbered, and each is scored with its own prompt."""
    workers = start_tiny(tmp_path / "model")
    prompts = prompts_of(workers)
    with workers.rollout_phase() as engine:
        options = engine.options(step=1, n=6, max_response_length=12)
        order = [(response.group, response.index) for response in engine.stream(prompts, options)]
        rollouts, rewards = collect(engine, prompts, pool, options)
    assert order != sorted(order)
    assert len(rewards.values) == len(rollouts) == 24
    for row, text in enumerate(rollouts.texts):
        assert bool(rewards.valid[row]) == (not text[:1].isdigit())
        if rewards.valid[row]:
            expected = len(text) + len(rollouts.prompt_of(row).text) / 100
            assert float(rewards.values[row]) == pytest.approx(expected)
        else:
            assert "a digit" in rewards.problems[row]
    assert 0 < rewards.num_invalid < 24
    assert set(rewards.problems) == {row for row in range(24) if not rewards.valid[row]}


def test_score_takes_any_function_and_gives_the_same(tmp_path: Path) -> None:
    rollouts = rollout(start_tiny(tmp_path / "model"))
    offset = 0.5  # of the enclosing function, as in a notebook

    def length(response: str, ground_truth: object) -> float:
        return len(response) + offset

    rewards = td.score(length, rollouts, workers=1)
    assert rewards.values.tolist() == [len(text) + 0.5 for text in rollouts.texts]
    assert bool(rewards.valid.all())


def test_score_warns_of_some_without_a_reward_and_raises_where_none_has_one(tmp_path: Path) -> None:
    """A typing error in the function was a run without rewards and without a word."""
    rollouts = rollout(start_tiny(tmp_path / "model"))

    def picky(response: str, ground_truth: object) -> float:
        if response == rollouts.texts[3]:
            raise KeyError("the fourth")
        return 1.0

    def broken(response: str, ground_truth: object) -> float:
        raise KeyError("a typing error")

    with pytest.warns(UserWarning, match=r"1 of 16 responses have no reward; the first: (?s:.*)the fourth") as caught:
        rewards = td.score(picky, rollouts, workers=1)
    assert len(caught) == 1
    assert rewards.valid.tolist() == [row != 3 for row in range(16)]
    with pytest.raises(RewardError, match=r"16 of 16 responses have no reward; the first: (?s:.*)a typing error"):
        td.score(broken, rollouts, workers=1)


def test_score_hands_on_how_the_function_is_called(tmp_path: Path) -> None:
    rollouts = rollout(start_tiny(tmp_path / "model"))

    def lengths(responses: list[str], ground_truths: list[object], factor: float) -> list[float]:
        return [factor * len(response) for response in responses]

    rewards = td.score(lengths, rollouts, options={"factor": 2.0}, batched=True, workers=1)
    assert rewards.values.tolist() == [2.0 * len(text) for text in rollouts.texts]


@pytest.mark.parametrize(
    ("values", "lengths", "mask_truncated", "expected"),
    [
        ((1.0, 0.0, 0.0), (4, 1, 2), False, True),
        ((1.0, 0.0, 0.0), (4, 1, 2), True, False),  # a response of four tokens is cut off
        ((1.0, 0.0, 0.0), (0, 1, 2), False, False),
        ((1.0, None, 1.0), (1, 1, 1), False, False),
        ((1.0, 1e39, 1.0), (1, 1, 1), False, False),
        ((1.0, 1.0 + 1e-9, 1.0), (1, 1, 1), False, False),
        ((None, None, 0.0), (1, 1, 1), False, False),
    ],
    ids=["contrast", "cut off", "empty", "no reward", "beyond float32", "equal in float32", "one reward"],
)
def test_fault_04_06_a_group_has_contrast_where_the_metric_and_the_advantages_say_so(
    values: tuple[float | None, ...], lengths: tuple[int, ...], mask_truncated: bool, expected: bool
) -> None:
    responses = [
        Response(0, index, (5,) * length, (-1.0,) * length, "", "length" if length == 4 else "stop")
        for index, length in enumerate(lengths)
    ]
    scores = [Score(value) for value in values]
    prompt = Prompt((5,), "")
    rollouts, rewards = Rollouts.from_responses([prompt], responses), as_rewards(scores)
    algorithm = AlgorithmConfig(mask_truncated=mask_truncated)
    assert _Group(prompt, responses, scores, None).has_contrast(mask_truncated) == expected
    assert groups_without_contrast(rollouts, rewards, mask_truncated=mask_truncated) == (not expected)
    assert bool(estimate_advantages(algorithm, rewards, rollouts).any()) == expected


@pytest.mark.parametrize("value", [1e39, -1e39, 3.5e38])
def test_a_reward_beyond_float32_is_none_and_ends_no_run(value: float) -> None:
    rewards = as_rewards([Score(1.0), Score(value), Score(3e38)])
    assert rewards.valid.tolist() == [True, False, True]
    assert rewards.values[1] == 0.0
    assert rewards.problems == {1: f"the reward {value} is too large: float32 ends at 3.4e38"}


def test_fault_33_metrics_are_averaged_over_the_rows_that_have_them() -> None:
    rewards = as_rewards(
        [Score(1.0, {"a": 1.0}), Score(None, error="raised", output="so far\n"), Score(0.0, {"a": 3.0, "b": 5.0})]
    )
    assert rewards.metrics == {"a": 2.0, "b": 5.0}
    assert {name: [str(value) for value in column.tolist()] for name, column in rewards.components.items()} == {
        "a": ["1.0", "nan", "3.0"],
        "b": ["nan", "nan", "5.0"],
    }
    assert rewards.valid.tolist() == [True, False, True]
    assert rewards.problems == {1: "raised\nprinted: so far"}
    assert (rewards.mean, rewards.num_invalid) == (0.5, 1)
