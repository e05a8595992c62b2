"""An engine with weights of its own, where the trainer's are spread over several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tandem.batch import Prompt, Response
from tandem.hybrid.rollout_side import make_engine
from tandem.hybrid.training_side import TrainingSide
from tandem.model.file_names import saved_buffers
from tandem.model.hf import attention_name
from tandem.model.layouts import layout_of, local
from tandem.model.lora import Lora
from tandem.model.ranks import Ranks
from tandem.model.reshard import Moved, Resharder
from tandem.model.skeleton import materialise, release
from tandem.model.tensor_parallel import engine_skeleton, tensor_parallel_mesh
from tandem.rollout.cache_memory import auto_cache_bytes
from tandem.rollout.options import SamplingOptions
from tandem.rollout.replicas import ReplicatedEngine


class OwnWeights:
    """Several ranks: the engine has tensors of its own in the layout of inference, filled from the trainer's shards."""

    def __init__(self, training: TrainingSide, ranks: Ranks) -> None:
        options = training.options
        tp_mesh = tensor_parallel_mesh(ranks, options.tensor_parallel, options.device)
        self._device = options.device
        self._model = engine_skeleton(
            training.policy.model.config,
            attention=attention_name(options.model),
            tp_mesh=tp_mesh,
            body_dtype=options.dtype,
            head_dtype=options.head_dtype,
            trust_remote_code=options.model.trust_remote_code,
        )
        cache_bytes = options.kv_cache_bytes
        self.engine = make_engine(
            training,
            self._model,
            kv_cache_bytes=auto_cache_bytes(options.device, ranks) if cache_bytes is None else cache_bytes,
            lockstep=None if tp_mesh is None else tp_mesh.get_group(),
        )
        self._replicated = ReplicatedEngine(self.engine, ranks, options.tensor_parallel)
        self._resharder = Resharder(ranks, training.engine_shards(), self._target(training, torch.device("meta")))
        self._policy_version: int | None = None  # of the weights; None = there are none

    def load(self, training: TrainingSide, policy_version: int) -> Moved | None:
        """See `RolloutSide`."""
        if self._policy_version == policy_version:
            return None
        training.bring_weights_back()
        if self._policy_version is None:
            materialise(self._model, self._device)
        target = self._target(training, self._device)
        moved = self._resharder.run(training.engine_shards(), target)
        if training.lora is not None:
            self._add_adapters(training.lora, target)
        for name, buffer in saved_buffers(training.policy.model).items():  # weights in all but name
            self._model.get_buffer(name).copy_(buffer)
        self._policy_version = policy_version
        return moved

    def _target(self, training: TrainingSide, device: torch.device) -> dict[str, Tensor]:
        """What to fill: the engine's weights, and for as long as they are merged the adapters' factors, all of each."""
        target: dict[str, Tensor] = dict(self._model.named_parameters())
        if training.lora is not None:
            target |= {name: torch.empty(shape, device=device) for name, shape in training.lora.shapes.items()}
        return target

    def _add_adapters(self, lora: Lora, moved: Mapping[str, Tensor]) -> None:
        """Merge into this rank's slices: W + scale * B A."""
        for name, delta in lora.deltas(moved).items():
            rows, columns = layout_of(moved[name]).ranges
            delta.add_to(local(moved[name]), rows, columns)

    def wake(self, policy_version: int) -> None:
        """See `RolloutSide`."""
        self.engine.wake(policy_version)

    def sleep(self) -> None:
        """See `RolloutSide`."""
        self.engine.sleep()

    def release(self) -> None:
        """See `RolloutSide`."""
        if self._policy_version is not None:
            release(self._model)
            self._policy_version = None

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        """See `RolloutSide`."""
        return self._replicated.stream(prompts, options)
