"""Ctrl-C while vLLM works, as in a notebook: the next phase has an engine that answers as before."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import nn

from tandem.errors import PhaseError
from tandem.rollout.vllm import VllmEngine
from tests.contract.engines import NEEDS_VLLM, folder_of, start_with
from tests.unit.hybrid.made import rollout, worker_of


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def interrupt_the_pass(model: nn.Module) -> None:
    model.register_forward_pre_hook(interrupt)


@NEEDS_VLLM
def test_an_interrupt_in_the_middle_of_a_step_leaves_a_usable_engine(tmp_path: Path) -> None:
    """Between the model's pass and the draw of a token, where vLLM takes up no other step; and while it computes."""
    with start_with("vllm", folder_of(tmp_path / "model")) as workers:
        before = rollout(workers)
        engine = worker_of(workers).sampling.engine
        assert isinstance(engine, VllmEngine)
        with workers.rollout_phase() as phase:
            stream = phase.stream(list(before.prompts), phase.options(step=1, n=4))
            next(stream)
            engine._llm.engine_core.engine_core.scheduler.get_grammar_bitmask = interrupt
            with pytest.raises(KeyboardInterrupt):
                list(stream)
            with pytest.raises(PhaseError, match="begin another rollout phase"):
                phase.generate(before.prompts, step=1)
        assert torch.equal(rollout(workers).rollout_logprobs, before.rollout_logprobs)
        engine._llm.apply_model(interrupt_the_pass)
        with pytest.raises(KeyboardInterrupt):
            rollout(workers)
        assert torch.equal(rollout(workers).rollout_logprobs, before.rollout_logprobs)
