"""One call of the embedded engine: prompts in, responses out, slot by slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers import PreTrainedModel

from tandem.batch import Prompt, Response
from tandem.errors import ModelError
from tandem.model.forward import head_logits, hidden_states
from tandem.rollout.cache_memory import auto_cache_bytes
from tandem.rollout.kv_cache import VIEW, CacheSpans, KVCache, PromptSpans
from tandem.rollout.options import SamplingOptions
from tandem.rollout.packed_linear import PackedLinears
from tandem.rollout.sampler import draw
from tandem.rollout.scheduler import ROWS, Request, Scheduler, num_slots, prefill_chunks, round_up
from tandem.rollout.slots import Slots
from tandem.rollout.stop import Decode, StopStrings

_GIB = 2**30


@dataclass(frozen=True)
class _Chunk:
    """Prompts that were prefilled together."""

    groups: range
    spans: PromptSpans
    begins: dict[int, int]  # group -> where its prompt starts in the row
    logits: Float[Tensor, "p V"]  # of the first token, for each of `groups`


class Generation:
    """Responses to some prompts, as they end. Create one per call; it holds no state of the engine but the cache.

    Attributes:
        cache: The memory used, for the next call to use again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        packed: PackedLinears,
        decode: Decode,
        prompts: Sequence[Prompt],
        options: SamplingOptions,
        *,
        eos_ids: Sequence[int],
        max_concurrent: int,
        kv_cache_bytes: int | None,
        take_cache: Callable[[], KVCache | None],
        lockstep: dist.ProcessGroup | None = None,
    ) -> None:
        """Prefill the first prompts and set up the slots. There are prompts; `take_cache` has one to use again."""
        self._model = model
        self._packed = packed
        self._decode_texts = decode
        self._prompts = prompts
        self._options = options
        self._eos_ids = frozenset(eos_ids)
        self._stop = StopStrings(options.stop, decode)
        self._device = torch.device(model.device)
        self._lockstep = lockstep

        self._chunks = iter(prefill_chunks([len(prompt.tokens) for prompt in prompts]))
        self._chunk = self._prefill(next(self._chunks))
        max_len = round_up(max(len(prompt.tokens) for prompt in prompts) + options.max_response_length, VIEW)
        slots = self._num_slots(max_concurrent, max_len, kv_cache_bytes)
        cache = take_cache()
        if cache is not None and (cache.slots < slots or cache.max_len < max_len):
            cache = None  # freed before a larger one is made
        self.cache = KVCache(self._chunk.spans, slots, max_len) if cache is None else cache
        self._scheduler = Scheduler(len(prompts), options.n, slots)
        vocabulary = torch.arange(self._chunk.logits.shape[1], device=self._device)
        is_eos = torch.isin(vocabulary, torch.tensor(sorted(self._eos_ids), dtype=torch.int64, device=self._device))
        self._slots = Slots(slots, options, is_eos)

    def responses(self) -> Iterator[Response]:
        """Write all responses, and yield each as it ends."""
        self._fill()
        while self._scheduler.active:
            yield from self._finish()
            if not self._fill() and self._scheduler.active:  # else first tokens were drawn, which may be last ones
                self._shrink()
                self._decode_step()

    def _num_slots(self, max_concurrent: int, max_len: int, kv_cache_bytes: int | None) -> int:
        cache_bytes = auto_cache_bytes(self._device) if kv_cache_bytes is None else kv_cache_bytes
        slot_bytes = KVCache.slot_bytes(self._chunk.spans, max_len)
        slots = num_slots(len(self._prompts) * self._options.n, max_concurrent, slot_bytes, cache_bytes)
        if slots == 0:
            needed = math.ceil(ROWS * slot_bytes / _GIB * 1000) / 1000
            raise ModelError(
                f"the KV cache may take {cache_bytes / _GIB:.3f} GiB, but {ROWS} sequences of {max_len} tokens, the "
                f"fewest that are decoded at once, need {needed:.3f} GiB",
                remedy=f"set rollout.kv_cache_gib={needed:.3f} or more, or lower rollout.max_response_length",
            )
        return slots

    @torch.no_grad()
    def _prefill(self, groups: range) -> _Chunk:
        """Run a chunk of prompts through the model, side by side in one row."""
        order = sorted(groups, key=lambda group: len(self._prompts[group].tokens))
        sequences = [self._prompts[group].tokens for group in order]
        total = sum(len(tokens) for tokens in sequences)
        padding = (0,) * (round_up(total, ROWS) - total)  # products of a few rows have other last bits
        if padding:
            sequences.append(padding)
        lengths = [len(tokens) for tokens in sequences]
        ids = self._integers([token for tokens in sequences for token in tokens])
        positions = torch.cat([torch.arange(length, device=self._device) for length in lengths])
        spans = PromptSpans(lengths)
        begins: dict[int, int] = {}
        begin = 0
        for group in order:
            begins[group] = begin
            begin += len(self._prompts[group].tokens)
        last = [begins[group] + len(self._prompts[group].tokens) - 1 for group in groups]
        last += [0] * (round_up(len(last), ROWS) - len(last))
        logits = self._logits(ids[None], positions[None], spans, self._integers(last))
        return _Chunk(groups, spans, begins, logits[: len(groups)])

    def _fill(self) -> bool:
        """Put waiting requests into free slots and draw their first tokens. Whether there were any."""
        filled = False
        while self._scheduler.can_assign:
            if self._scheduler.next_group not in self._chunk.groups:
                self._chunk = self._prefill(next(self._chunks))
            self._begin(self._scheduler.assign(self._chunk.groups))
            filled = True
        return filled

    @torch.no_grad()
    def _begin(self, assigned: list[tuple[int, Request]]) -> None:
        """Fork prompts of the current chunk to slots and draw the first tokens."""
        lengths = [len(self._prompts[request.group].tokens) for _, request in assigned]
        begins = [self._chunk.begins[request.group] for _, request in assigned]
        slots = [slot for slot, _ in assigned]
        by_length = sorted(range(len(assigned)), key=lambda row: lengths[row])
        for length, rows in groupby(by_length, key=lambda row: lengths[row]):
            same = list(rows)
            self.cache.fork(
                self._chunk.spans,
                self._integers([slots[row] for row in same]),
                self._integers([begins[row] for row in same]),
                length,
            )
        noise = self._slots.start(
            self._integers(slots),
            self._integers([self._prompts[request.group].prompt_id for _, request in assigned]),
            self._integers([request.index for _, request in assigned]),
            self._integers(lengths),
        )
        first = self._chunk.groups.start
        logits = self._chunk.logits[self._integers([request.group - first for _, request in assigned])]
        tokens, logprobs = self._draw(logits, noise)
        self._slots.append_first(self._integers(slots), tokens, logprobs)

    @torch.no_grad()
    def _decode_step(self) -> None:
        """One more token for each response."""
        slots = self._slots
        spans = CacheSpans(self.cache, slots.position, longest=int(slots.position.max()))
        logits = self._logits(slots.token[:, None], slots.position[:, None], spans)
        tokens, logprobs = self._draw(logits, slots.noise())
        slots.append(tokens, logprobs)

    def _draw(
        self, logits: Float[Tensor, "m V"], noise: Float64[Tensor, " m"]
    ) -> tuple[Int64[Tensor, " m"], Float[Tensor, " m"]]:
        tokens, logprobs = draw(logits, noise, self._options)
        if self._lockstep is not None:  # sums on a GPU may differ in last bits, and ranks must not part ways
            dist.broadcast(tokens, group=self._lockstep, group_src=0)
        return tokens, logprobs

    def _shrink(self) -> None:
        """Go on with a smaller grid once few responses are left."""
        kept = self._scheduler.shrink()
        if kept is not None:
            self._slots.shrink(self._integers(kept))
            self.cache.shrink(self._integers(kept))

    def _finish(self) -> list[Response]:
        """Take the responses that have ended out of their slots."""
        ended = self._slots.ended.nonzero()[:, 0].tolist()
        if self._stop:
            ended = sorted({*ended, *self._stopped()})
        if not ended:
            return []
        written = self._slots.take(ended)
        bodies = [tokens[:-1] if tokens[-1] in self._eos_ids else tokens for tokens, _ in written]
        texts = self._decode_texts(bodies)
        return [
            self._response(self._scheduler.release(slot), tokens, logprobs, text)
            for slot, (tokens, logprobs), text in zip(ended, written, texts, strict=True)
        ]

    def _response(self, request: Request, tokens: list[int], logprobs: list[float], text: str) -> Response:
        if not all(map(math.isfinite, logprobs)):
            prompt_id = self._prompts[request.group].prompt_id
            raise ModelError(
                f"the model's logits are not finite (response {request.index} to prompt {prompt_id})",
                remedy="the weights have diverged: lower trainer.lr, or start from an earlier checkpoint",
            )
        text, stopped = self._stop.cut(text)
        stopped = stopped or tokens[-1] in self._eos_ids
        return Response(
            request.group, request.index, tuple(tokens), tuple(logprobs), text, "stop" if stopped else "length"
        )

    def _stopped(self) -> list[int]:
        """Slots whose newest token completes a stop string: seen at the end of the text, confirmed in the whole."""
        active = self._scheduler.active
        ends = self._stop.found(self._slots.read(active, newest=self._stop.window))
        seen = [slot for slot, found in zip(active, ends, strict=True) if found]
        if not seen:
            return []
        return [slot for slot, found in zip(seen, self._stop.found(self._slots.read(seen)), strict=True) if found]

    def _logits(
        self,
        ids: Int64[Tensor, "b T"],
        positions: Int64[Tensor, "b T"],
        spans: PromptSpans | CacheSpans,
        rows: Int64[Tensor, " N"] | None = None,
    ) -> Float[Tensor, "N V"]:
        """The model on these tokens: logits after each, or after those at `rows` of all b * T."""
        with self._packed.used():
            hidden = hidden_states(self._model, ids, positions, spans).flatten(0, 1)
            return head_logits(self._model, hidden if rows is None else hidden[rows])

    def _integers(self, values: Sequence[int]) -> Int64[Tensor, " m"]:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
