"""The embedded engine: generation in plain PyTorch, with the very modules that the trainer trains.

Each prompt is prefilled once and forked to the responses of its group. Responses are decoded together, one token
each per step, in a grid of slots; a slot whose response has ended gets the next one at once. The log-prob of a token
is kept as it is drawn.

The same inputs give the same responses to the bit. What else is in the batch does not change a response, either, as
long as the products of the model give a row the same bits whatever the other rows are: true for dense models on CPUs
(the grid is a multiple of 8 rows for that reason), not for mixtures of experts, whose experts get varying numbers of
rows, nor where more than two ranks have a slice each, as the order of their sums may depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.batch import Prompt, Response, Rollouts
from tandem.errors import ModelError
from tandem.model.support import context_of
from tandem.model.tensor_parallel import sliced_linears
from tandem.rollout.engine import checked_length
from tandem.rollout.generation import Generation
from tandem.rollout.kv_cache import KVCache
from tandem.rollout.options import SamplingOptions
from tandem.rollout.packed_linear import PackedLinears
from tandem.rollout.stop import split_stop


class EmbeddedEngine:
    """Generates with a transformers model whose attention is Tandem's (`tandem.model.attention.register`).

    The weights are the trainer's own tensors, which may change in place. What is derived from them (on CPUs, large
    linear layers in a layout that suits decoding) is made at the first response after `wake` and freed by `sleep`: call
    `wake` after a change. The KV cache keeps its memory from call to call, never its content.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_ids: Sequence[int],
        max_concurrent: int = 256,
        kv_cache_bytes: int | None = None,
        lockstep: dist.ProcessGroup | None = None,
    ) -> None:
        """Nothing is allocated before the first response.

        Args:
            model: A causal language model on its device.
            tokenizer: Decodes responses.
            eos_ids: Every token that ends a response.
            max_concurrent: Responses decoded at once, rounded up to a multiple of 8.
            kv_cache_bytes: Most memory of the KV cache, which takes what `max_concurrent` responses need, or less;
                None = a quarter of the device's memory.
            lockstep: Ranks that have a slice of the model each. All must make the same calls, and read every response.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.max_concurrent = max_concurrent
        self.kv_cache_bytes = kv_cache_bytes
        self.lockstep = lockstep
        self.policy_version = 0
        self._awake = True
        self._cache: KVCache | None = None
        self._packed: PackedLinears | None = None

    def wake(self, policy_version: int) -> None:
        """Get ready to answer with the weights as they are now, which are those of `policy_version`."""
        self.policy_version = policy_version
        self._packed = None
        self._awake = True

    def sleep(self) -> None:
        """Free the KV cache and what is derived from the weights. No response can be asked for until `wake`."""
        self._cache = None
        self._packed = None
        self._awake = False

    def generate(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Rollouts:
        """All responses, in the order of the prompts; see `stream`."""
        responses = list(self.stream(prompts, options))
        return Rollouts.from_responses(
            prompts, responses, temperature=options.temperature or 1.0, policy_version=self.policy_version
        )

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        """Yield each response as soon as it ends, in an order that depends on the inputs only.

        The model is put into eval mode. A prompt may occur several times; `prompt_id` tells the noise of two draws
        of the same prompt apart.

        Raises:
            PhaseError: The engine is asleep.
            DataError: A prompt without tokens.
            ModelError: Prompt and response are longer than the model's positions; the KV cache's memory is too small;
                the model's logits are not finite.
        """
        self.check(prompts, options)
        self.model.eval()
        return self._stream(prompts, options)

    def check(self, prompts: Sequence[Prompt], options: SamplingOptions) -> None:
        """What `stream` finds wrong before it begins.

        Raises:
            PhaseError, DataError, ModelError: See `stream`.
        """
        longest = checked_length(prompts, options, awake=self._awake)
        positions, note = context_of(self.model.config)
        if positions is not None and longest > positions:
            raise ModelError(
                f"a prompt and its response may take {longest} tokens, the model has {positions} positions{note}",
                remedy="lower data.max_prompt_length or rollout.max_response_length",
            )

    def _stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        if not prompts:
            return
        if self._packed is None:
            self._packed = PackedLinears(self.model, sliced_linears(self.model))
        stop_ids, stop_texts = split_stop(options.stop, self.tokenizer)
        generation = Generation(
            self.model,
            self._packed,
            self._decode,
            prompts,
            replace(options, stop=stop_texts),
            eos_ids=(*self.eos_ids, *stop_ids),
            max_concurrent=self.max_concurrent,
            kv_cache_bytes=self.kv_cache_bytes,
            take_cache=self._take_cache,
            lockstep=self.lockstep,
        )
        try:
            yield from generation.responses()
        finally:
            if self._awake:
                self._cache = generation.cache

    def _take_cache(self) -> KVCache | None:
        """It is lent out for as long as responses are drawn: a second stream meanwhile gets its own."""
        cache, self._cache = self._cache, None
        return cache

    def _decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        # No "clean up": it takes spaces out of what the policy wrote.
        token_lists = [list(tokens) for tokens in sequences]
        return self.tokenizer.batch_decode(token_lists, skip_special_tokens=True, clean_up_tokenization_spaces=False)
