"""Which rank runs which rows: every row once, about the same work for all, micro-batches in step."""

from __future__ import annotations

import random

import pytest
import torch

from tandem.batch import Rollouts
from tandem.model.ranks import ALONE, Ranks
from tandem.trainer.balance import RowCost, rank_micro_batches, spread
from tandem.trainer.packing import Costs, PackingOptions, micro_batches, pack
from tests.unit.trainer.made import make_rollouts, trainee

CPU = torch.device("cpu")
COSTS = Costs(per_token=1000.0, per_pair=1.0, per_target=300.0)


def loads(rows: list[RowCost], shares: list[list[int]]) -> list[float]:
    result: list[float] = []
    for share in shares:
        prompts = {rows[place].group: rows[place].prompt for place in share}
        result.append(sum(prompts.values()) + sum(rows[place].response for place in share))
    return result


def random_rows(seed: int) -> list[RowCost]:
    """Groups of all sizes, long and short prompts, responses whose lengths differ by a factor of 100."""
    random_ = random.Random(seed)
    return [
        RowCost(group, prompt, random_.choice([1.0, 5.0, 100.0]) * random_.random())
        for group in range(random_.randint(1, 12))
        for prompt in [random_.choice([0.0, 1.0, 50.0])]
        for _ in range(random_.randint(1, 9))
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(10))
def test_every_row_is_dealt_out_once_and_no_rank_has_much_more_than_its_share(num_ranks: int, seed: int) -> None:
    """At most by one response with its prompt: the last one that a rank got, when it had the least to do."""
    rows = random_rows(seed)
    shares = spread(rows, num_ranks)
    assert sorted(place for share in shares for place in share) == list(range(len(rows)))
    found = loads(rows, shares)
    mean = sum(found) / num_ranks
    assert max(found) <= 1.02 * mean + max(row.prompt + row.response for row in rows)


def test_whole_groups_where_they_balance() -> None:
    rows = [RowCost(group, 10.0, 1.0) for group in (0, 1, 2, 3) for _ in range(4)]
    for num_ranks in (1, 2, 4):
        groups = [{rows[place].group for place in share} for share in spread(rows, num_ranks)]
        assert sum(map(len, groups)) == 4


def test_one_group_of_eight_is_halved_between_two_ranks() -> None:
    assert spread([RowCost(0, 30.0, 1.0)] * 8, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_only_the_group_that_is_over_is_cut() -> None:
    """Three on two ranks: one each, and half each of the third."""
    rows = [RowCost(group, 1.0, 4.0) for group in (0, 1, 2) for _ in range(4)]
    first, second = spread(rows, 2)
    assert (len(first), len(second)) == (6, 6)
    assert {rows[place].group for place in first} & {rows[place].group for place in second} == {2}


def test_a_long_prompt_is_not_run_again_for_a_little_balance() -> None:
    """The second rank has little to do, but less would be gained than the prompt takes."""
    rows = [*[RowCost(0, 90.0, 5.0)] * 4, RowCost(1, 80.0, 3.0)]
    assert spread(rows, 2) == [[4], [0, 1, 2, 3]]


@pytest.mark.parametrize("num_rows", range(4))
def test_fault_30_fewer_rows_than_ranks(num_rows: int) -> None:
    shares = spread([RowCost(0, 2.0, 1.0)] * num_rows, 4)
    assert shares == [[place] for place in range(num_rows)] + [[]] * (4 - num_rows)


def plans(rollouts: Rollouts, rows: list[int], options: PackingOptions, size: int) -> list[list[list[int]]]:
    """Of each rank, as it works them out for itself."""
    return [rank_micro_batches(rollouts, rows, options, COSTS, Ranks(rank, size)) for rank in range(size)]


@pytest.mark.parametrize("packing", ["auto", "shared_prefix", "varlen", "none"])
@pytest.mark.parametrize("max_tokens", [1, 20, 100_000])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_fault_28_all_ranks_have_equally_many_micro_batches(packing: str, max_tokens: int, size: int) -> None:
    """One response is as long as all others together."""
    rollouts = make_rollouts(prompt_lengths=(9, 2, 5), response_lengths=((3, 1, 6), (8, 2, 4), (1, 40, 5)))
    rows = [7, 0, 3, 1, 8, 2, 4]
    options = PackingOptions(packing, max_tokens)
    found = plans(rollouts, rows, options, size)
    assert len({len(parts) for parts in found}) == 1
    assert sorted(row for parts in found for part in parts for row in part) == sorted(rows)
    assert any(all(parts) for parts in found), "there are no more of them than one rank needs"
    for parts in found:
        filled = [part for part in parts if part]
        assert parts[: len(filled)] == filled, "those without rows are the last"
        for part in filled:
            tokens = pack(rollouts, part, packing=packing, costs=COSTS, device=CPU).tokens
            assert tokens.numel() <= max_tokens or len(part) == 1


def test_costly_micro_batches_run_at_the_same_time() -> None:
    """Short and long responses in turns: in the order of the rows, one rank's long ones would meet short ones."""
    rollouts = make_rollouts(prompt_lengths=(3,) * 6, response_lengths=((2,), (2,), (40,), (40,), (2,), (40,)))
    lengths = rollouts.response_lengths.tolist()
    for parts in plans(rollouts, list(range(6)), PackingOptions("none"), 2):
        found = [lengths[row] for part in parts for row in part]
        assert found == sorted(found, reverse=True)


def test_response_tokens_cost_more_than_prompt_tokens_by_the_head() -> None:
    """Equal numbers of tokens in the layers; with the head, the two long responses belong on different ranks."""
    rollouts = make_rollouts(prompt_lengths=(30, 2, 2), response_lengths=((1,), (15,), (15,)))

    def rows_of_ranks(costs: Costs) -> list[list[int]]:
        found = [rank_micro_batches(rollouts, range(3), PackingOptions(), costs, Ranks(rank, 2)) for rank in (0, 1)]
        return [sorted(row for part in parts for row in part) for parts in found]

    assert rows_of_ranks(Costs(per_token=1.0, per_pair=0.0, per_target=0.0)) == [[0], [1, 2]]
    assert rows_of_ranks(Costs(per_token=1.0, per_pair=0.0, per_target=3.0)) == [[0, 1], [2]]
    assert trainee().policy.costs().per_target == 2 * 104 * 64


def test_no_rows_are_no_micro_batches() -> None:
    assert plans(make_rollouts(), [], PackingOptions(), 2) == [[], []]


def test_alone_a_rank_cuts_the_rows_in_their_order() -> None:
    rollouts, options = make_rollouts(), PackingOptions("auto", 20)
    rows = [7, 0, 3, 1, 11, 2]
    assert rank_micro_batches(rollouts, rows, options, COSTS, ALONE) == micro_batches(rollouts, rows, options, COSTS)


def test_a_micro_batch_without_rows_runs_and_has_gradients_of_zero() -> None:
    """Of every weight: a weight without a gradient would be missing in the sum over ranks."""
    learner = trainee()
    policy = learner.policy
    row = pack(make_rollouts(), [], packing="auto", costs=policy.costs(), device=policy.device)
    logprobs, entropy = policy(row, temperature=0.7, entropy_gradient=True)
    assert logprobs.shape == entropy.shape == (0,)
    assert row.to_matrix(logprobs).shape == (0, make_rollouts().response_tokens.shape[1])
    logprobs.sum().backward()
    for weight in learner.model.parameters():
        assert weight.grad is not None
        assert not weight.grad.any()
