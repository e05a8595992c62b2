"""Which rows run together, and how they lie side by side. The numbers that come out are held in tests/parity."""

from __future__ import annotations

import pytest
import torch

from tandem.batch import Rollouts
from tandem.trainer.packing import (
    Costs,
    PackedRow,
    Packing,
    PackingOptions,
    micro_batches,
    pack,
    separate_cost,
    shared_cost,
)
from tests.unit.trainer.made import make_rollouts

COSTS = Costs(per_token=1000.0, per_pair=100.0, per_target=500.0)
CPU = torch.device("cpu")


def packed(rollouts: Rollouts, rows: list[int], packing: Packing) -> PackedRow:
    return pack(rollouts, rows, packing=packing, costs=COSTS, device=CPU)


@pytest.mark.parametrize("packing", ["shared_prefix", "varlen", "auto", "none"])
@pytest.mark.parametrize("max_tokens", [1, 10, 17, 40, 10_000])
def test_every_row_is_in_one_micro_batch_and_the_budget_holds(packing: Packing, max_tokens: int) -> None:
    """A single sequence longer than the budget runs on its own; everything else fits."""
    rollouts = make_rollouts()
    rows = [7, 0, 3, 1, 11, 2, 10, 4]  # of a mini-batch: not all, and in an order of their own
    parts = micro_batches(rollouts, rows, PackingOptions(packing, max_tokens), COSTS)
    assert sorted(row for part in parts for row in part) == sorted(rows)
    for part in parts:
        assert packed(rollouts, part, packing).tokens.shape[1] <= max_tokens or len(part) == 1


@pytest.mark.parametrize("max_tokens", [130, 170, 250])
def test_the_budget_holds_where_a_whole_group_would_share_its_prompt_and_a_piece_of_it_does_not(
    max_tokens: int,
) -> None:
    rollouts = make_rollouts(prompt_lengths=(40,), response_lengths=((41,) * 8,))
    assert packed(rollouts, list(range(8)), "auto").tokens.shape[1] == 40 + 8 * 40
    assert packed(rollouts, [0, 1], "auto").tokens.shape[1] == 2 * (40 + 40)
    for part in micro_batches(rollouts, range(8), PackingOptions("auto", max_tokens), COSTS):
        assert packed(rollouts, part, "auto").tokens.shape[1] <= max_tokens


def test_none_runs_each_sequence_on_its_own() -> None:
    rollouts = make_rollouts()
    assert micro_batches(rollouts, range(12), PackingOptions("none", 10_000), COSTS) == [[row] for row in range(12)]


def test_a_group_stays_together_where_it_fits_also_if_its_rows_are_scattered() -> None:
    rollouts = make_rollouts()
    rows = [0, 3, 6, 1, 4, 7, 2, 5, 8]
    parts = micro_batches(rollouts, rows, PackingOptions("shared_prefix", 17), COSTS)
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_group_larger_than_the_budget_is_cut_and_its_prompt_repeated() -> None:
    rollouts = make_rollouts(prompt_lengths=(6,), response_lengths=((5, 5, 5, 5),))
    parts = micro_batches(rollouts, range(4), PackingOptions("shared_prefix", 14), COSTS)
    assert parts == [[0, 1], [2, 3]]
    sizes = [packed(rollouts, part, "shared_prefix").tokens.shape[1] for part in parts]
    assert sizes == [6 + 4 + 4, 6 + 4 + 4]


def test_small_groups_fill_a_micro_batch_together() -> None:
    rollouts = make_rollouts(prompt_lengths=(3, 3, 3), response_lengths=((2, 2), (2, 2), (2, 2)))
    parts = micro_batches(rollouts, range(6), PackingOptions("shared_prefix", 10), COSTS)
    assert parts == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("packing", ["shared_prefix", "varlen"])
def test_each_target_is_predicted_from_the_token_before_it(packing: Packing) -> None:
    """Positions count on from the prompt; the last token of a response is not run at all."""
    rollouts = make_rollouts()
    rows = [4, 9, 3, 0]
    row = packed(rollouts, rows, packing)
    tokens, positions = row.tokens[0].tolist(), row.positions[0].tolist()
    seen: dict[tuple[int, int], int] = {}
    for index, target, place, column in zip(
        row.index.tolist(), row.targets.tolist(), row.rows.tolist(), row.columns.tolist(), strict=True
    ):
        sequence = [
            *rollouts.prompt_of(rows[place]).tokens,
            *rollouts.response_tokens[rows[place], : rollouts.response_lengths[rows[place]]].tolist(),
        ]
        where = len(rollouts.prompt_of(rows[place]).tokens) + column
        assert target == sequence[where]
        assert tokens[index] == sequence[where - 1]
        assert positions[index] == where - 1
        seen[place, column] = target
    assert len(seen) == sum(int(rollouts.response_lengths[other]) for other in rows)


def test_fault_14_results_are_laid_back_in_their_own_rows() -> None:
    """Rows of two groups interleaved: packing gathers groups, the matrix has the order that was asked for."""
    rollouts = make_rollouts()
    rows = [3, 0, 5, 2]
    row = packed(rollouts, rows, "shared_prefix")
    matrix = row.to_matrix(row.targets.float())
    for place, number in enumerate(rows):
        length = int(rollouts.response_lengths[number])
        assert matrix[place, :length].tolist() == rollouts.response_tokens[number, :length].tolist()
        assert not matrix[place, length:].any()


def test_sharing_runs_the_prompt_once() -> None:
    rollouts = make_rollouts(prompt_lengths=(20,), response_lengths=((3, 3, 3, 3),))
    assert packed(rollouts, [0, 1, 2, 3], "shared_prefix").tokens.shape[1] == 20 + 4 * 2
    assert packed(rollouts, [0, 1, 2, 3], "varlen").tokens.shape[1] == 4 * (20 + 2)


@pytest.mark.parametrize(
    ("prompt", "response", "shares"),
    [(2, 200, False), (200, 20, True), (40, 40, True)],
    ids=["short prompt, long responses", "long prompt, short responses", "alike"],
)
def test_auto_takes_what_needs_fewer_operations(prompt: int, response: int, shares: bool) -> None:
    """Sharing saves the prompt in the linear layers and costs whole rectangles in attention."""
    rollouts = make_rollouts(prompt_lengths=(prompt,), response_lengths=((response,) * 4,))
    lengths = [response - 1] * 4
    assert (shared_cost(prompt, lengths, COSTS) <= separate_cost(prompt, lengths, COSTS)) == shares
    expected = "shared_prefix" if shares else "varlen"
    assert packed(rollouts, [0, 1, 2, 3], "auto").tokens.shape == packed(rollouts, [0, 1, 2, 3], expected).tokens.shape


def test_auto_does_not_share_with_nobody() -> None:
    rollouts = make_rollouts(prompt_lengths=(30,), response_lengths=((4,),))
    assert packed(rollouts, [0], "auto").tokens.shape[1] == 33
