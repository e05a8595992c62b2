"""Architecture by architecture: what each engine can sample from, and what both refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.errors import ModelError
from tests.contract.engines import SIZE, TOLERANCE, each_engine, folder_of, gap, start_with
from tests.tiny import ARCHITECTURES, UNSUITABLE
from tests.unit.hybrid.made import rollout

# Where a size is another one for heads of 32.
SIZES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"hidden_size": 128},
    "Phi3ForCausalLM": {"hidden_size": 128},
    "GPT2LMHeadModel": {"n_embd": 128},
    "Qwen3MoeForCausalLM": {**SIZE, "norm_topk_prob": True, "moe_intermediate_size": 48},  # which vLLM pads
}


@each_engine
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_the_trainers_for_each_architecture(engine: str, architecture: str, tmp_path: Path) -> None:
    """One after the other in this process, before and after a large update."""
    folder = folder_of(tmp_path / "model", architecture, overrides=SIZES.get(architecture, SIZE))
    with start_with(engine, folder) as workers:
        assert gap(workers, rollout(workers)) < TOLERANCE
        with workers.train_phase() as trainer:
            trainer.supervised_update([[5, 6, 7]], [[8, 9, 1]], lr=0.1)
        assert gap(workers, rollout(workers)) < TOLERANCE


@each_engine
@pytest.mark.parametrize("architecture", UNSUITABLE)
def test_hybrid_and_recurrent_architectures_are_refused(engine: str, architecture: str, tmp_path: Path) -> None:
    """vLLM has some of them; the trainer cannot serve any, and says so before an engine is started."""
    folder = folder_of(tmp_path / "model", architecture, overrides={})
    with pytest.raises(ModelError, match=f"{architecture} cannot be served"):
        start_with(engine, folder)
