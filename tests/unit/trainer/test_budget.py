from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from tandem.model.ranks import Ranks
from tandem.trainer.budget import MemoryPlan, activation_bytes_per_token, plan_memory
from tests.tiny import ARCHITECTURES, tiny_model

CPU = torch.device("cpu")


def large() -> PreTrainedConfig:
    """The shape of a model with 7 billion weights."""
    return AutoConfig.for_model("llama")


def plan(config: PreTrainedConfig, **changes: object) -> MemoryPlan:
    return plan_memory(config, **{"dtype": torch.float32, "device": CPU, "max_sequence": 2048, **changes})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_an_estimate(architecture: str) -> None:
    config = tiny_model(architecture).config
    estimate = activation_bytes_per_token(config, torch.float32)
    assert 2 * 64 * 4 < estimate < 100_000
    assert activation_bytes_per_token(config, torch.bfloat16) * 2 == estimate


def test_the_estimate_is_on_the_safe_side_of_what_a_backward_pass_keeps() -> None:
    """Counted: the tensors that autograd saves in a forward pass of the body, weights left out."""
    model = tiny_model("Qwen3ForCausalLM", attention="sdpa")
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = 64
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.base_model(torch.arange(tokens)[None] + 2, use_cache=False)
    assert output.last_hidden_state.requires_grad
    per_token = sum(kept.values()) / tokens
    estimate = activation_bytes_per_token(model.config, torch.float32)
    assert estimate / 2 < per_token <= estimate


def test_what_the_user_sets_stays() -> None:
    assert plan(large(), micro_batch_tokens=77, activation_checkpointing=False) == MemoryPlan(77, False)
    assert plan(large(), micro_batch_tokens=77, activation_checkpointing=True) == MemoryPlan(77, True)


def test_a_small_model_gets_large_micro_batches_without_checkpointing() -> None:
    assert plan(tiny_model().config) == MemoryPlan(65536, False)


def test_checkpointing_is_switched_on_where_one_sequence_does_not_fit() -> None:
    assert not plan(large(), max_sequence=100).activation_checkpointing
    assert plan(large(), max_sequence=8192).activation_checkpointing
    assert plan(large(), max_sequence=100, micro_batch_tokens=8192).activation_checkpointing


def test_checkpointing_leaves_room_for_more_tokens() -> None:
    config = AutoConfig.for_model("llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    without = plan(config, activation_checkpointing=False).micro_batch_tokens
    assert plan(config, activation_checkpointing=True).micro_batch_tokens > 2 * without


def test_ranks_on_cpus_have_the_memory_of_one_together_and_all_the_same_plan() -> None:
    """However they are spread over machines: a run that starts anew on others must cut its batches as before."""
    config = AutoConfig.for_model("llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    alone = plan(config).micro_batch_tokens
    plans = [plan(config, ranks=ranks) for ranks in (Ranks(0, 2, 2), Ranks(1, 2, 2), Ranks(0, 2, 1))]
    assert [each.micro_batch_tokens for each in plans] == [alone // 2] * 3
    assert plan(config, max_sequence=7000) == MemoryPlan(alone, False)
    assert plan(config, max_sequence=7000, ranks=Ranks(0, 2, 2)).activation_checkpointing
