"""The advantage functions in examples/losses: against plain loops, and in a step of a real run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.losses.gdpo import gdpo
from examples.losses.grpo_passk import grpo_passk
from examples.losses.opo import opo
from tandem import config_from_dict, train
from tandem.algorithm.protocols import AdvantageFunction
from tests.loop.small_run import small_config

NAN = float("nan")
REWARD = """
def score(response, ground_truth):
    right, ones = float(ground_truth in response), response.count("1") / 8
    return {"score": right + ones, "right": right, "ones": ones}
"""


def random_step(seed: int) -> dict[str, Tensor]:
    """20 responses in four groups of any size, a fifth group of one and a sixth of equal rewards; some are invalid."""
    generator = torch.Generator().manual_seed(seed)
    group_ids = torch.cat([torch.randint(0, 4, (20,), generator=generator), torch.tensor([7, 9, 9, 9])])
    rewards = torch.randint(0, 4, (24,), generator=generator) / 4 + torch.rand(24, generator=generator) * 0.01
    rewards[21:] = 0.1
    valid = torch.rand(24, generator=generator) < 0.8
    valid[20:] = True
    mask = torch.rand(24, 6, generator=generator) < 0.6
    mask[:, 0] = True
    return {"rewards": rewards.where(valid, NAN), "valid": valid, "group_ids": group_ids, "response_mask": mask}


def rows_of_group(step: dict[str, Tensor], i: int) -> list[int]:
    """The valid responses of i's group, i included."""
    same = (step["group_ids"] == step["group_ids"][i]) & step["valid"]
    return same.nonzero().flatten().tolist()


@pytest.mark.parametrize("seed", range(3))
def test_opo_subtracts_the_mean_reward_weighted_by_length(seed: int) -> None:
    step = random_step(seed)
    advantages = opo(**step)
    rewards, lengths = step["rewards"].double().tolist(), step["response_mask"].sum(dim=1).tolist()
    for i in step["valid"].nonzero().flatten().tolist():
        rows = rows_of_group(step, i)
        baseline = sum(lengths[j] * rewards[j] for j in rows) / sum(lengths[j] for j in rows)
        assert advantages[i].item() == pytest.approx(rewards[i] - baseline, abs=1e-12)
    assert not advantages[20:].any()
    assert not advantages[~step["valid"]].any()


@pytest.mark.parametrize("seed", range(3))
def test_grpo_passk_is_what_the_best_reward_loses_without_the_response(seed: int) -> None:
    step = random_step(seed)
    advantages = grpo_passk(**step)
    rewards = step["rewards"].double().tolist()
    for i in step["valid"].nonzero().flatten().tolist():
        rows = rows_of_group(step, i)
        others = [rewards[j] for j in rows if j != i]
        lost = max(rewards[j] for j in rows) - max(others) if others else 0.0
        assert advantages[i].item() == pytest.approx(lost, abs=1e-12)
    assert int(advantages.ne(0).sum()) == 4
    assert not advantages[~step["valid"]].any()


@pytest.mark.parametrize("seed", range(3))
def test_gdpo_normalises_each_reward_in_its_group_then_the_sum_over_the_step(seed: int) -> None:
    step = random_step(seed)
    generator = torch.Generator().manual_seed(100 + seed)
    components = {
        "right": step["rewards"],
        "short": 100.0 * torch.rand(24, generator=generator),
        "unused": torch.ones(24),
    }
    components["short"][21:] = 30.0
    components["short"][0] = NAN
    weights = {"right": 1.0, "short": 0.5}
    advantages = gdpo(components=components, weights=weights, **step)
    sums = dict.fromkeys(step["valid"].nonzero().flatten().tolist(), 0.0)
    for name, weight in weights.items():
        numbers = components[name].double().tolist()
        for i in sums:
            own = [numbers[j] for j in rows_of_group(step, i) if numbers[j] == numbers[j]]
            if len(own) > 1 and numbers[i] == numbers[i]:
                mean = sum(own) / len(own)
                std = (sum((x - mean) ** 2 for x in own) / (len(own) - 1)) ** 0.5
                sums[i] += weight * (numbers[i] - mean) / (std + 1e-6)
    mean = sum(sums.values()) / len(sums)
    assert mean == pytest.approx(0.0, abs=1e-6)
    std = (sum((x - mean) ** 2 for x in sums.values()) / (len(sums) - 1)) ** 0.5
    for i, total in sums.items():
        assert advantages[i].item() == pytest.approx((total - mean) / (std + 1e-6), abs=1e-5)
    assert not advantages[20:].any()
    assert not advantages[~step["valid"]].any()


def test_gdpo_tells_mixtures_apart_that_have_the_same_sum() -> None:
    components = {"a": torch.tensor([1.0, 0.0, 0.0, 0.0]), "b": torch.tensor([0.0, 1.0, 1.0, 0.0])}
    step = {"valid": torch.ones(4, dtype=torch.bool), "group_ids": torch.zeros(4, dtype=torch.int64)}
    advantages = gdpo(components=components, **step)
    assert advantages[0] > advantages[1] + 0.2
    assert advantages[1] == advantages[2]


@pytest.mark.parametrize(
    ("components", "weights"), [({}, None), ({"right": torch.ones(2)}, {"right": 1.0, "tidy": 1.0})]
)
def test_gdpo_without_its_rewards_is_an_error_that_names_them(
    components: dict[str, Tensor], weights: dict[str, float] | None
) -> None:
    step = {"valid": torch.ones(2, dtype=torch.bool), "group_ids": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"gdpo needs rewards beside the score.*the reward function returns \["):
        gdpo(components=components, weights=weights, **step)


EXAMPLES: dict[str, AdvantageFunction] = {
    "opo": opo,
    "grpo_passk": grpo_passk,
    "gdpo": partial(gdpo, weights={"right": 1.0, "ones": 0.5}),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_run_takes_it_as_its_advantage(name: str, tmp_path: Path) -> None:
    config = small_config(tmp_path, {"run": {"steps": 1}})
    (tmp_path / "reward.py").write_text(REWARD)
    run = train(config_from_dict(config), advantage=EXAMPLES[name])
    (step,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert step["policy/grad_norm"] > 0
    responses = [json.loads(line) for line in (run / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert len(responses) == 16
    mask = torch.zeros(16, 4, dtype=torch.bool)
    for row, response in enumerate(responses):
        mask[row, : len(response["mask"])] = torch.tensor(response["mask"]).bool()
    ones = torch.tensor([response["response"].count("1") / 8 for response in responses])
    rewards = torch.tensor([response["reward"] for response in responses])
    expected = EXAMPLES[name](
        rewards=rewards,
        valid=torch.ones(16, dtype=torch.bool),
        group_ids=torch.tensor([response["group"] for response in responses]),
        response_mask=mask,
        components={"right": rewards - ones, "ones": ones},
    )
    logged = torch.tensor([response["advantage"] for response in responses])
    torch.testing.assert_close(logged, expected.float(), rtol=1e-5, atol=1e-5)
    assert logged.any()
