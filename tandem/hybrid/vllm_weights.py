"""vLLM as the side that samples: it gets whole tensors from the trainer, and has to show that it understood them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from tandem.batch import Prompt, Response, Rollouts
from tandem.errors import ModelError
from tandem.hybrid.training_side import TrainingSide
from tandem.model.ranks import Ranks
from tandem.model.reshard import BUCKET_BYTES, Moved
from tandem.model.whole_tensors import WholeTensors
from tandem.observe.console import Console
from tandem.rollout.cache_memory import auto_cache_bytes
from tandem.rollout.options import SamplingOptions
from tandem.rollout.replicas import ReplicatedEngine
from tandem.rollout.vllm import VllmEngine, VllmSettings
from tandem.rollout.vllm_checks import cache_bytes_needed

# Mean difference of a log-prob, over 1 + the mean size of one. Rounding to bfloat16 makes 0.001 of it in tiny models
# and up to 0.013 in SmolLM2-135M, whose probe has log-probs of 15 nats: what is 0.6 nats off there, or 0.25 in a tiny
# model, is found.
_MOST_DIFFERENT = {torch.float32: 1e-3, torch.bfloat16: 0.04}
_PROBE_TOKENS = 32
_LEAST_LENGTH = 3  # two tokens of a probe have a log-prob between them, and vLLM draws one after them


class VllmWeights:
    """See `RolloutSide`. vLLM has weights of its own on any number of ranks, one included.

    After every wake the log-probs of one fixed sequence are compared with the trainer's: a tensor that went astray, or
    that did not survive a sleep, ends the run instead of bending it.
    """

    def __init__(self, training: TrainingSide, ranks: Ranks) -> None:
        """Start vLLM. Call it on all ranks at once.

        Args:
            training: Of this rank; its options say how large the engine is.
            ranks: All of them.

        Raises:
            ModelError: vLLM refuses the model or an option, or has too little memory.
        """
        options, model = training.options, training.policy.model
        config = deepcopy(model.config)
        config.architectures = [options.facts.architecture]
        positions = options.facts.context.length
        longest = max(options.max_sequence, _LEAST_LENGTH)
        max_length = longest if positions is None else min(longest, positions)
        self._ranks = ranks
        self._training = training
        self.engine = VllmEngine(
            config,
            training.tokenizer,
            VllmSettings(
                dtype=options.dtype,
                head_dtype=options.head_dtype,
                device=options.device,
                max_length=max_length,
                max_concurrent=options.max_concurrent,
                kv_cache_bytes=options.kv_cache_bytes
                or min(
                    auto_cache_bytes(options.device, ranks),
                    cache_bytes_needed(
                        config,
                        max_length,
                        options.dtype,
                        options.tensor_parallel,
                        sequences=options.max_concurrent,
                    ),
                ),
                tensor_parallel=options.tensor_parallel,
                seeded=options.deterministic,
                options=options.vllm_options,
            ),
            eos_ids=options.facts.eos_ids,
            ranks=ranks,
        )
        self._replicated = ReplicatedEngine(self.engine, ranks, options.tensor_parallel)
        self._whole = WholeTensors(
            ranks,
            model,
            {} if ranks.alone else training.engine_shards(),
            names=training.names,
            dtype=options.dtype,
            device=options.device,
            lora=training.lora,
        )
        self._probe = _probe(config.vocab_size, min(_PROBE_TOKENS, max_length - 1))
        self._expected: tuple[float, ...] = ()
        self._policy_version: int | None = None  # of the weights; None = there are none

    def load(self, training: TrainingSide, policy_version: int) -> Moved | None:
        """See `RolloutSide`. Where a call of vLLM's was interrupted, on any rank, it is started anew first."""
        if any(self._ranks.gather(self.engine.is_broken)):
            self.engine.restart(self.engine.sleep_level)
            self._policy_version = None
        if self._policy_version == policy_version:
            return None
        begin = time.perf_counter()
        self._send()
        logprobs = training.old_logprobs(self._probe)
        self._expected = tuple(logprobs[0].tolist())
        self._policy_version = policy_version
        moved = self._whole.bytes_moved
        return Moved(moved, moved, 2 * BUCKET_BYTES, time.perf_counter() - begin)

    def wake(self, policy_version: int) -> None:
        """See `RolloutSide`.

        Raises:
            ModelError: The engine's log-probs are not the trainer's.
        """
        self.engine.wake(policy_version)
        difference, most = self._difference(), _MOST_DIFFERENT[self._training.options.dtype]
        if difference <= most:
            return
        if self.engine.keeps_weights:
            raise ModelError(
                f"vLLM's log-probs of one fixed sequence differ from the trainer's by {difference:.3g} in the mean "
                f"(relative to their size), where rounding accounts for {most:g} at most: its weights are not the "
                "policy's, or it computes something else with them",
                remedy=_remedy(self._training.options.vllm_options),
            )
        if self._ranks.rank == 0:
            Console().warn(
                "vllm",
                f"after a sleep its log-probs differ from the trainer's by {difference:.3g}",
                "it starts anew, and from now on keeps its weights in the host's memory while it sleeps (level 1)",
            )
        self.engine.restart(sleep_level=1)
        self._send()
        self._training.put_weights_away()
        self.wake(policy_version)

    def sleep(self) -> None:
        """See `RolloutSide`."""
        self.engine.sleep()
        if not self.engine.keeps_weights:
            self._policy_version = None

    def release(self) -> None:
        """See `RolloutSide`: where weights can be freed, sleep has done it."""

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        """See `RolloutSide`."""
        return self._replicated.stream(prompts, options)

    def _send(self) -> None:
        self._training.bring_weights_back()
        shards = {} if self._ranks.alone else self._training.engine_shards()
        self.engine.load_weights(self._whole.read(shards))

    def _difference(self) -> float:
        """Mean difference of the probe's log-probs over 1 + their mean size; that of the rank where it is largest."""
        written = [*self._probe.prompts[0].tokens, *self._probe.response_tokens[0].tolist()]
        found = torch.tensor(self.engine.score(written), dtype=torch.float64)
        expected = torch.tensor(self._expected, dtype=torch.float64)
        mean = ((found - expected).abs().mean() / (1 + expected.abs().mean())).nan_to_num(nan=float("inf"))
        return max(self._ranks.gather(float(mean)))


def _remedy(vllm_options: Mapping[str, Any]) -> str:
    report = "set rollout.engine=embedded; please report the model and vLLM's version"
    return f"leave out rollout.vllm_options ({', '.join(vllm_options)}), or {report}" if vllm_options else report


def _probe(vocabulary: int, length: int) -> Rollouts:
    """A fixed sequence, as a response to its first token; all over the vocabulary."""
    first, *others = [(1 + 7919 * position) % vocabulary for position in range(length)]
    response = Response(0, 0, tuple(others), (0.0,) * len(others), "", "length")
    return Rollouts.from_responses([Prompt((first,), "")], [response])
