"""What a worker is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tandem.config.critic import CriticConfig
from tandem.config.model import ModelConfig
from tandem.config.trainer import TrainerConfig
from tandem.model.facts import ModelFacts


@dataclass(frozen=True)
class WorkerOptions:
    """The same on every rank; every `auto` that does not need the model is resolved."""

    model: ModelConfig  # with `lora_rank` > 0 the base that adapters are put into
    trainer: TrainerConfig
    facts: ModelFacts
    device: torch.device
    dtype: torch.dtype  # of the computation
    head_dtype: torch.dtype
    max_sequence: int  # longest prompt and response together, in tokens
    engine: Literal["embedded", "vllm"]
    vllm_options: Mapping[str, Any]
    deterministic: bool
    max_concurrent: int  # in each engine
    kv_cache_bytes: int | None
    tensor_parallel: int
    offload: Literal["none", "host", "disk"]
    offload_folder: Path | None  # for "disk"
    measure_memory: bool  # of each phase
    seed: int
    critic: CriticConfig | None = None  # None = there is no critic
    adapter: Path | None = None  # folder that the adapters go on from; None = they begin
