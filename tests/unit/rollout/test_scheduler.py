"""Which response is decoded where: a function of the inputs only."""

from __future__ import annotations

from tandem.rollout.scheduler import PREFILL_PROMPTS, PREFILL_TOKENS, Request, Scheduler, num_slots, prefill_chunks


def test_slots_are_a_multiple_of_eight() -> None:
    assert num_slots(5, 256, 100, 10**9) == 8
    assert num_slots(100, 256, 100, 10**9) == 104
    assert num_slots(1000, 60, 100, 10**9) == 64


def test_slots_fit_the_memory() -> None:
    assert num_slots(1000, 256, 100, 100 * 47) == 40
    assert num_slots(1000, 256, 100, 100 * 7) == 0


def test_prefill_chunks_cover_all_prompts_within_the_budget() -> None:
    lengths = [500, 1500, 1500, 9000, 3, *[1] * (2 * PREFILL_PROMPTS)]
    chunks = prefill_chunks(lengths)
    assert [prompt for chunk in chunks for prompt in chunk] == list(range(len(lengths)))
    assert chunks[:3] == [range(2), range(2, 3), range(3, 4)]
    for chunk in chunks:
        assert len(chunk) <= PREFILL_PROMPTS
        assert len(chunk) == 1 or sum(lengths[prompt] for prompt in chunk) <= PREFILL_TOKENS
    assert prefill_chunks([]) == []


def test_requests_are_handed_out_group_by_group_to_the_lowest_free_slot() -> None:
    scheduler = Scheduler(num_prompts=3, n=4, slots=8)
    assert scheduler.assign(range(1)) == [(slot, Request(0, slot)) for slot in range(4)]
    assert scheduler.assign(range(1)) == []
    assert [request for _, request in scheduler.assign(range(1, 3))] == [Request(1, index) for index in range(4)]
    assert not scheduler.can_assign
    assert scheduler.release(6) == Request(1, 2)
    assert scheduler.release(1) == Request(0, 1)
    assert scheduler.can_assign
    assert scheduler.assign(range(1, 3)) == [(1, Request(2, 0)), (6, Request(2, 1))]


def test_the_grid_shrinks_to_half_or_less_once_nothing_waits() -> None:
    scheduler = Scheduler(num_prompts=4, n=8, slots=24)
    scheduler.assign(range(4))
    assert scheduler.shrink() is None
    for slot in range(8):
        scheduler.release(slot)
    assert scheduler.shrink() is None  # requests wait
    scheduler.assign(range(4))
    for slot in range(24):
        if slot not in (3, 17, 20):
            scheduler.release(slot)
    kept = scheduler.shrink()
    assert kept is not None
    assert kept[:3] == [3, 17, 20]
    assert len(set(kept)) == 8
    assert scheduler.active == [0, 1, 2]
    assert scheduler.shrink() is None
