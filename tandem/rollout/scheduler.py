"""Which response is decoded in which slot, and when. A function of the inputs only, never of time.

The slots are the rows of every product of a decode step, and a product's last bits depend on its number of rows when
there are few: so there are always a multiple of 8, and slots without a response are computed along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ROWS = 8  # slots come in multiples of this
PREFILL_TOKENS = 2048  # prompt tokens in one forward; a longer prompt goes alone
PREFILL_PROMPTS = 64  # bounds the logits kept for the first tokens of a chunk's responses


class Request(NamedTuple):
    """A response to be written: number `index` of the group that answers prompt `group`."""

    group: int
    index: int


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def num_slots(num_responses: int, max_concurrent: int, slot_bytes: int, cache_bytes: int) -> int:
    """A multiple of 8: as many as there are responses, as `max_concurrent` allows and as fit in the memory.

    Returns 0 where not even 8 slots fit.
    """
    return min(round_up(min(num_responses, max_concurrent), ROWS), cache_bytes // slot_bytes // ROWS * ROWS)


def prefill_chunks(lengths: Sequence[int]) -> list[range]:
    """Cut the prompts, in order, into chunks that are prefilled in one forward each.

    They depend on the prompts alone, not on the slots, so that a prompt's numbers do not depend on the slots, either.
    """
    chunks: list[range] = []
    begin, tokens = 0, 0
    for prompt, length in enumerate(lengths):
        if prompt > begin and (tokens + length > PREFILL_TOKENS or prompt - begin == PREFILL_PROMPTS):
            chunks.append(range(begin, prompt))
            begin, tokens = prompt, 0
        tokens += length
    if lengths:
        chunks.append(range(begin, len(lengths)))
    return chunks


class Scheduler:
    """Hands the requests, group by group, to the slots that are free."""

    def __init__(self, num_prompts: int, n: int, slots: int) -> None:
        self._n = n
        self._next = 0
        self._total = num_prompts * n
        self.slots: list[Request | None] = [None] * slots

    @property
    def next_group(self) -> int | None:
        """The prompt of the next request; None when all were handed out."""
        return self._next // self._n if self._next < self._total else None

    @property
    def can_assign(self) -> bool:
        """Whether a request waits and a slot is free."""
        return self._next < self._total and None in self.slots

    @property
    def active(self) -> list[int]:
        """The slots with a response, in ascending order."""
        return [slot for slot, request in enumerate(self.slots) if request is not None]

    def assign(self, groups: range) -> list[tuple[int, Request]]:
        """Put the next requests of these groups into free slots, lowest slot first."""
        assigned = []
        for slot, occupant in enumerate(self.slots):
            if self.next_group is None or self.next_group not in groups:
                break
            if occupant is None:
                request = Request(*divmod(self._next, self._n))
                self.slots[slot] = request
                assigned.append((slot, request))
                self._next += 1
        return assigned

    def release(self, slot: int) -> Request:
        """Free a slot whose response has ended."""
        request = self.slots[slot]
        assert request is not None
        self.slots[slot] = None
        return request

    def shrink(self) -> list[int] | None:
        """Move the last responses into half of the slots or fewer: the old slot of each new one.

        None as long as requests wait or more than half of the slots are in use.
        """
        active = self.active
        slots = round_up(len(active), ROWS)
        if self.next_group is not None or not active or 2 * slots > len(self.slots):
            return None
        idle = [slot for slot, request in enumerate(self.slots) if request is None]
        kept = active + idle[: slots - len(active)]
        self.slots = [self.slots[slot] for slot in kept]
        return kept
