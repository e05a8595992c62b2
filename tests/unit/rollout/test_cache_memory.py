"""The bound on the KV cache where the config sets none."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.model.ranks import Ranks
from tandem.rollout.cache_memory import auto_cache_bytes, container_bytes
from tests.ranks import RankProcesses

CPU = torch.device("cpu")


def test_a_container_limit_below_the_machines_memory_counts(tmp_path: Path) -> None:
    limit, none, missing = tmp_path / "limit", tmp_path / "none", tmp_path / "missing"
    limit.write_text("5000\n")
    none.write_text("max\n")
    assert container_bytes(8000, (none, missing)) == 8000
    assert container_bytes(8000, (none, limit)) == 5000
    assert container_bytes(3000, (limit,)) == 3000


def test_auto_is_the_same_each_time_and_less_than_the_machine() -> None:
    bound = auto_cache_bytes(CPU)
    assert bound == auto_cache_bytes(CPU)
    assert 2**20 < bound < 2**50


def with_more_neighbours_on_later_ranks(ranks: Ranks) -> int:
    return auto_cache_bytes(CPU, Ranks(ranks.rank, ranks.size, local_size=ranks.rank + 1))


def test_ranks_share_their_machine_and_all_have_what_the_least_has(ranks: RankProcesses) -> None:
    first, second = ranks.run(with_more_neighbours_on_later_ranks, 2)
    assert first == second == auto_cache_bytes(CPU, Ranks(local_size=2))
    assert abs(2 * first - auto_cache_bytes(CPU)) <= 2  # rounded down
