"""Workers with a tiny model in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tandem as td
from tandem.hybrid.worker import Worker
from tests.tiny import tiny_model_folder

TEXTS = ("1+2=", "a longer prompt than the other: 17 + 4 =", "x", "1+2=")


def start_tiny(
    folder: Path,
    *,
    lr: float = 1e-2,
    tie: bool = True,
    config: Mapping[str, Mapping[str, Any]] | None = None,
) -> td.Workers:
    """Workers that hold a tiny Qwen3, on one thread. `folder` is made unless it is there."""
    if not folder.exists():
        tiny_model_folder(folder, tie=tie)
    sections: dict[str, dict[str, Any]] = {"cluster": {"threads": 1}, "rollout": {"max_concurrent": 8}}
    for name, section in (config or {}).items():
        sections[name] = {**sections.get(name, {}), **section}
    return td.start(folder, lr=lr, config=sections)


def worker_of(workers: td.Workers) -> Worker:
    """The one rank."""
    return workers._group.call(_itself)


def _itself(worker: Worker) -> Worker:
    return worker


def prompts_of(workers: td.Workers) -> list[td.Prompt]:
    """Some prompts of different length."""
    return [
        td.Prompt(tuple(workers.tokenizer.encode(text)), text, prompt_id=number) for number, text in enumerate(TEXTS)
    ]


def rollout(
    workers: td.Workers, *, step: int = 1, temperature: float = 0.7, n: int = 4, length: int = 8
) -> td.Rollouts:
    """A rollout phase: groups of responses."""
    with workers.rollout_phase() as engine:
        return engine.generate(prompts_of(workers), n=n, max_response_length=length, temperature=temperature, step=step)


def trainer_logprobs(workers: td.Workers, rollouts: td.Rollouts) -> Tensor:
    """What the trainer finds for the responses, in a pass of its own."""
    return workers._group.call(Worker.old_logprobs, rollouts)


def contrast(rollouts: td.Rollouts) -> Tensor:
    """Advantages +1, -1, +1, ... of the responses."""
    return torch.tensor([1.0, -1.0]).repeat(len(rollouts))[: len(rollouts)]


def config_of(**sections: Mapping[str, Any]) -> td.Config:
    """A checked config, for rooms that take a section of it; its model is never loaded."""
    return td.config_from_dict({"model": {"path": "policy"}, **sections}, need_data=False, need_reward=False)
