"""The side of a worker that samples: an engine, and where it has its weights from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch.distributed as dist
from transformers import PreTrainedModel

from tandem.batch import Prompt, Response
from tandem.hybrid.training_side import TrainingSide
from tandem.model.reshard import Moved
from tandem.rollout.embedded import EmbeddedEngine
from tandem.rollout.engine import Engine
from tandem.rollout.options import SamplingOptions


class RolloutSide(Protocol):
    """Gets weights, samples, and gives its memory back."""

    @property
    def engine(self) -> Engine:
        """What answers on this rank."""
        ...

    def load(self, training: TrainingSide, policy_version: int) -> Moved | None:
        """Have the policy's weights as they are now, which are those of `policy_version`; None = nothing was moved."""
        ...

    def wake(self, policy_version: int) -> None:
        """Get ready to answer. The trainer's float32 weights may be away by now."""
        ...

    def sleep(self) -> None:
        """Free the KV cache."""
        ...

    def release(self) -> None:
        """Free the weights, as far as they are the engine's own."""
        ...

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        """Yield responses as they end: this rank's share of them."""
        ...


class SharedWeights:
    """Alone: the engine reads the very tensors that the trainer writes. Nothing moves."""

    def __init__(self, training: TrainingSide) -> None:
        self.engine = make_engine(training, training.policy.model, kv_cache_bytes=training.options.kv_cache_bytes)

    def load(self, training: TrainingSide, policy_version: int) -> None:
        """See `RolloutSide`: they are there."""
        training.policy.model.eval()

    def wake(self, policy_version: int) -> None:
        """See `RolloutSide`."""
        self.engine.wake(policy_version)

    def sleep(self) -> None:
        """See `RolloutSide`."""
        self.engine.sleep()

    def release(self) -> None:
        """See `RolloutSide`: none of them is the engine's own."""

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        """See `RolloutSide`: all of them."""
        return self.engine.stream(prompts, options)


def make_engine(
    training: TrainingSide,
    model: PreTrainedModel,
    *,
    kv_cache_bytes: int | None,
    lockstep: dist.ProcessGroup | None = None,
) -> EmbeddedEngine:
    """An engine that sleeps; see `EmbeddedEngine`."""
    options = training.options
    engine = EmbeddedEngine(
        model,
        training.tokenizer,
        eos_ids=options.facts.eos_ids,
        max_concurrent=options.max_concurrent,
        kv_cache_bytes=kv_cache_bytes,
        lockstep=lockstep,
    )
    engine.sleep()
    return engine
