"""Which rank runs which rows of a mini-batch, so that all of them are done at about the same time.

Under FSDP every layer of every pass is a collective, so the ranks go through their micro-batches in step, and all must
have the same number of them. The plan follows from lengths and groups alone: each rank works out the whole of it, and
all of them work out the same, without asking one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.batch import Rollouts
from tandem.model.ranks import Ranks
from tandem.trainer.packing import Costs, PackingOptions, micro_batches, separate_cost

_SLACK = 1.02  # how far over the mean a whole group may load a rank, before it is rather cut


@dataclass(frozen=True)
class RowCost:
    """Operations that a response takes, and those of its prompt: once for all of its group that one rank has."""

    group: int
    prompt: float
    response: float


def rank_micro_batches(
    rollouts: Rollouts, rows: Sequence[int], options: PackingOptions, costs: Costs, ranks: Ranks
) -> list[list[int]]:
    """Rows of each micro-batch of this rank: as many as on every other. The last ones may have no rows.

    Together the ranks have every row once. The costly ones come first: what runs at the same time then takes about
    the same time. Alone, a rank keeps the order of the rows.
    """
    if ranks.alone:
        return micro_batches(rollouts, rows, options, costs)
    row_costs = dict(zip(rows, _row_costs(rollouts, rows, options, costs), strict=True))

    def cost(part: Sequence[int]) -> float:
        members = [row_costs[row] for row in part]
        return sum({row.group: row.prompt for row in members}.values()) + sum(row.response for row in members)

    parts = [
        sorted(micro_batches(rollouts, [rows[place] for place in share], options, costs), key=cost, reverse=True)
        for share in spread(list(row_costs.values()), ranks.size)
    ]
    mine = parts[ranks.rank]
    return mine + [[] for _ in range(max(map(len, parts)) - len(mine))]


def _row_costs(rollouts: Rollouts, rows: Sequence[int], options: PackingOptions, costs: Costs) -> list[RowCost]:
    lengths, groups = rollouts.response_lengths.tolist(), rollouts.group_ids.tolist()
    shares_prompt = options.packing in ("auto", "shared_prefix")
    result: list[RowCost] = []
    for row in rows:
        prompt = len(rollouts.prompt_of(row).tokens)
        whole = separate_cost(prompt, [lengths[row] - 1], costs) + costs.per_target * lengths[row]
        shared = separate_cost(prompt, [0], costs) if shares_prompt else 0.0
        result.append(RowCost(groups[row], shared, whole - shared))
    return result


def spread(rows: Sequence[RowCost], num_ranks: int) -> list[list[int]]:
    """Deal rows out to ranks by cost: positions in `rows` for each rank, ascending.

    Groups go whole to the rank with the least to do, the costliest first. One that would load it with more than its
    share waits, and is then dealt out response by response: two ranks have half each of a single group. A rank that
    gets the first response of a group runs the prompt for it, and that counts.
    """
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.group, []).append(place)

    def cost(members: Sequence[int]) -> float:
        return rows[members[0]].prompt + sum(rows[place].response for place in members)

    order = sorted(groups.values(), key=cost, reverse=True)  # stable: equal ones in the order of the rows
    most = _SLACK * sum(map(cost, order)) / num_ranks
    loads = [0.0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    to_cut: list[list[int]] = []
    for members in order:
        rank = loads.index(min(loads))
        if loads[rank] + cost(members) <= most:
            loads[rank] += cost(members)
            shares[rank] += members
        else:
            to_cut.append(members)
    for members in to_cut:
        prompts = [rows[members[0]].prompt] * num_ranks  # what it would cost each rank to have it
        for place in sorted(members, key=lambda place: rows[place].response, reverse=True):
            after = [load + prompt for load, prompt in zip(loads, prompts, strict=True)]
            rank = after.index(min(after))
            loads[rank] = after[rank] + rows[place].response
            shares[rank].append(place)
            prompts[rank] = 0.0
    return [sorted(share) for share in shares]
