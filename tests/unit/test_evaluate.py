from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

import tandem as td
from tandem.evaluate import evaluate, pass_at_k
from tandem.rewards.pool import RewardPool
from tests.unit.hybrid.made import config_of, start_tiny

REWARD = '''
def score(solution_str, ground_truth, data_source):
    """1 for a response that begins with a letter of the ground truth; nothing for what begins with a digit."""
    if data_source == "broken" or solution_str[:1].isdigit():
        raise ValueError("no reward")
    return {"score": float(solution_str[:1] in ground_truth), "length": len(solution_str)}
'''
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_all_draws_of_k_with_a_pass(n: int) -> None:
    """Brute force over all subsets of the n responses."""
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> td.Workers:
    return start_tiny(tmp_path_factory.mktemp("evaluate") / "model", config={"rollout": {"max_response_length": 3}})


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    file = tmp_path_factory.mktemp("reward") / "reward.py"
    file.write_text(REWARD)
    config = config_of(reward={"function": f"{file}:score", "workers": 1})
    with td.start_rewards(config.reward) as pool:
        yield pool


def prompts_of(workers: td.Workers, source: str = "", count: int = 6, truth: str = LETTERS) -> tuple[td.Prompt, ...]:
    texts = [f"{source} {number}:" for number in range(count)]
    return tuple(
        td.Prompt(tuple(workers.tokenizer.encode(text)), text, truth, source, prompt_id=number)
        for number, text in enumerate(texts)
    )


def evaluation_of(
    workers: td.Workers,
    pool: RewardPool,
    sets: dict[str, tuple[td.Prompt, ...]],
    *,
    n: int = 1,
    temperature: float | None = None,
    step: int = 5,
) -> td.Evaluation:
    config = config_of(evaluation={"data": "held_out.jsonl", "n": n, "temperature": temperature})
    return evaluate(workers, pool, sets, config.evaluation, step=step)


def by_hand(workers: td.Workers, prompts: tuple[td.Prompt, ...], n: int) -> list[list[bool | None]]:
    """Passed, failed or without a reward, for each response to each prompt: sampled and scored a second time."""
    with workers.rollout_phase() as engine:
        rollouts = engine.generate(prompts, n=n, max_response_length=3, step=5, seed=0x5EED)
    groups: list[list[bool | None]] = [[] for _ in prompts]
    for row, text in enumerate(rollouts.texts):
        group = int(rollouts.group_ids[row])
        groups[group].append(None if text[:1].isdigit() else text[:1] in prompts[group].ground_truth)
    return groups


def test_responses_without_a_reward_are_left_out_and_counted(workers: td.Workers, pool: RewardPool) -> None:
    prompts = prompts_of(workers, count=12)
    groups = by_hand(workers, prompts, n=4)
    valid = [[passed for passed in group if passed is not None] for group in groups]
    num_invalid = sum(passed is None for group in groups for passed in group)
    assert 0 < num_invalid < 48

    evaluation = evaluation_of(workers, pool, {"": prompts}, n=4)

    assert evaluation.num_invalid == num_invalid
    assert evaluation.num_prompts == 12
    assert evaluation.step == 5
    shares = [sum(group) / len(group) for group in valid if group]
    mean = sum(shares) / len(shares)
    assert evaluation.metrics["pass@1"] == pytest.approx(mean)
    spread = math.sqrt(sum((share - mean) ** 2 for share in shares) / (len(shares) - 1))
    assert evaluation.metrics["pass@1_stderr"] == pytest.approx(spread / math.sqrt(len(shares)))
    pairs = [pass_at_k(len(group), sum(group), 2) for group in valid if len(group) >= 2]
    assert evaluation.metrics["pass@2"] == pytest.approx(sum(pairs) / len(pairs))
    assert {name for name in evaluation.metrics if "@" in name and "stderr" not in name} == {
        "pass@1",
        "pass@2",
        "pass@4",
    }
    assert evaluation.metrics["pass@1"] < evaluation.metrics["pass@2"] < evaluation.metrics["pass@4"]


def test_several_sets_and_sources_have_names_of_their_own(workers: td.Workers, pool: RewardPool) -> None:
    easy, hard = prompts_of(workers, "easy"), prompts_of(workers, "hard", truth="")
    found = evaluation_of(workers, pool, {"mixed": (*easy, *hard), "plain": prompts_of(workers, "plain")}, n=2).metrics
    assert {name.removesuffix("pass@1") for name in found if name.endswith("pass@1")} == {
        "",
        "mixed/",
        "mixed/easy/",
        "mixed/hard/",
        "plain/",
    }
    assert found["mixed/hard/pass@1"] == 0.0
    assert found["mixed/easy/pass@1"] > found["mixed/pass@1"] > 0
    single = evaluation_of(workers, pool, {"": (*easy, *hard)}).metrics
    assert {"pass@1", "easy/pass@1", "hard/pass@1"} <= single.keys()


def test_a_set_without_any_reward_is_not_a_number_and_never_0(workers: td.Workers, pool: RewardPool) -> None:
    evaluation = evaluation_of(workers, pool, {"": prompts_of(workers, "broken")}, n=2)
    assert evaluation.num_invalid == 12
    assert evaluation.problem is not None
    assert evaluation.problem.startswith("prompt: ")
    assert "\nproblem: reward function " in evaluation.problem
    assert math.isnan(evaluation.metrics["pass@1"])
    assert math.isnan(evaluation.metrics["reward"])


def test_fault_30_one_prompt_is_evaluated_once_without_a_standard_error(workers: td.Workers, pool: RewardPool) -> None:
    evaluation = evaluation_of(workers, pool, {"": prompts_of(workers, count=1)})
    assert evaluation.num_prompts == 1
    assert math.isnan(evaluation.metrics["pass@1_stderr"])


def test_n_that_is_no_power_of_two_is_reported_too(workers: td.Workers, pool: RewardPool) -> None:
    found = evaluation_of(workers, pool, {"": prompts_of(workers, count=2)}, n=6).metrics
    assert [name for name in found if name.startswith("pass@") and "stderr" not in name] == [
        f"pass@{k}" for k in (1, 2, 4, 6)
    ]


def test_temperature_0_evaluates_the_likeliest_answer(workers: td.Workers, pool: RewardPool) -> None:
    """So that the step, which changes the noise, changes nothing."""
    prompts = prompts_of(workers)
    greedy = evaluation_of(workers, pool, {"": prompts}, temperature=0.0)
    assert evaluation_of(workers, pool, {"": prompts}, temperature=0.0, step=6).metrics == greedy.metrics
    sampled = [evaluation_of(workers, pool, {"": prompts}, n=4, step=step).metrics for step in (5, 6)]
    assert sampled[0] != sampled[1]
