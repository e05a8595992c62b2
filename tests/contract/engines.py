"""The engines that one contract holds for, and workers that sample with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tandem as td
from tandem.rollout.vllm_checks import is_installed
from tests.tiny import tiny_model_folder
from tests.unit.hybrid.made import start_tiny, trainer_logprobs

NEEDS_VLLM = pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: make vllm")
ENGINES = ("embedded", pytest.param("vllm", marks=NEEDS_VLLM))
each_engine = pytest.mark.parametrize("engine", ENGINES)

TOLERANCE = 2e-5  # nats, contract 3, in float32

# Heads of a size that vLLM's attention on CPUs has.
SIZE = {"head_dim": 32}
LENGTHS = {"max_prompt_length": 48}
MAX_RESPONSE_LENGTH = 16


def folder_of(path: Path, architecture: str = "Qwen3ForCausalLM", **settings: Any) -> Path:
    """A tiny model that both engines serve. Returns `path`."""
    return tiny_model_folder(path, architecture, **{"overrides": SIZE, **settings})


def start_with(engine: str, folder: Path, config: Mapping[str, Mapping[str, Any]] | None = None) -> td.Workers:
    """Workers in this process that sample with `engine`."""
    return start_tiny(folder, config=with_engine(engine, config or {}))


def with_engine(engine: str, config: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The config's sections, with the engine and lengths that a tiny model has."""
    rollout = {"engine": engine, "max_response_length": MAX_RESPONSE_LENGTH, **config.get("rollout", {})}
    return {"data": LENGTHS, **{name: dict(section) for name, section in config.items()}, "rollout": rollout}


def gap(workers: td.Workers, rollouts: td.Rollouts) -> float:
    """The largest one between the engine's log-probs and the trainer's."""
    gaps = (trainer_logprobs(workers, rollouts) - rollouts.rollout_logprobs)[rollouts.response_mask]
    return float(gaps.abs().max())
