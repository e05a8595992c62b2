"""Which models can be cut over how many ranks, and what a rank then has."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tandem.model.attention import NAMES
from tandem.model.ranks import Ranks
from tandem.model.skeleton import materialise, release, skeleton
from tandem.model.tensor_parallel import (
    engine_skeleton,
    sliced_linears,
    tensor_parallel_mesh,
    tensor_parallel_problems,
)
from tests.ranks import RankProcesses
from tests.sliced import CPU, fill
from tests.tiny import ARCHITECTURES, tiny_model

PLANNED = [architecture for architecture in ARCHITECTURES if architecture != "GPT2LMHeadModel"]


def whole(
    architecture: str,
    overrides: Mapping[str, object] | None = None,
    *,
    vocab_size: int = 104,
    plan: Mapping[str, str] | None = None,
    tie: bool = True,
) -> PreTrainedModel:
    """Without memory. `plan` replaces rules of the architecture's own; an empty style removes one."""
    config = tiny_model(architecture, overrides=overrides, vocab_size=vocab_size, tie=tie).config
    if plan:
        rules = {**config.base_model_tp_plan, **plan}
        config.base_model_tp_plan = {name: style for name, style in rules.items() if style}
    return skeleton(config)


@pytest.mark.parametrize("architecture", PLANNED)
def test_fitting_sizes_are_no_problem(architecture: str) -> None:
    assert tensor_parallel_problems(whole(architecture), 1) == []
    assert tensor_parallel_problems(whole(architecture), 2) == []
    assert tensor_parallel_problems(whole(architecture, {"num_key_value_heads": 4}), 4) == []


@pytest.mark.parametrize(
    ("architecture", "overrides", "vocab_size", "size", "against", "valid"),
    [
        ("LlamaForCausalLM", {"num_key_value_heads": 1}, 104, 2, "num_key_value_heads=1", "1"),
        ("LlamaForCausalLM", {}, 104, 3, "num_attention_heads=4, num_key_value_heads=2, vocab_size=104", "1 or 2"),
        ("Gemma3ForCausalLM", {}, 102, 4, "vocab_size=102, num_key_value_heads=2", "1 or 2"),
        ("Qwen3ForCausalLM", {"intermediate_size": 97}, 104, 2, "intermediate_size=97", "1"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 33}, 104, 2, "moe_intermediate_size=33", "1"),
        (
            "Qwen2ForCausalLM",
            {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3},
            120,
            2,
            "num_attention_heads=9, num_key_value_heads=3",
            "1 or 3",
        ),
        (
            "Qwen2ForCausalLM",
            {"num_attention_heads": 8, "num_key_value_heads": 8},
            104,
            16,
            "vocab_size=104, num_attention_heads=8, num_key_value_heads=8",
            "1, 2, 4 or 8",
        ),
        ("Phi3ForCausalLM", {"intermediate_size": 97}, 104, 2, "intermediate_size=97", "1"),
    ],
)
def test_fault_45_the_sizes_that_fit_are_named(
    architecture: str, overrides: Mapping[str, object], vocab_size: int, size: int, against: str, valid: str
) -> None:
    (problem,) = tensor_parallel_problems(whole(architecture, overrides, vocab_size=vocab_size), size)
    assert sorted(problem.message.rpartition("'s ")[2].split(", ")) == sorted(against.split(", "))
    assert problem.message.startswith(f"rollout.tensor_parallel is {size}, which does not divide {architecture}'s")
    assert problem.remedy == f"set rollout.tensor_parallel to {valid}"


def test_fused_attention_is_not_cut_by_heads() -> None:
    """Of Phi-3 every rank computes all heads: what must divide are the sizes of its fused weights."""
    assert tensor_parallel_problems(whole("Phi3ForCausalLM", {"num_key_value_heads": 1}), 2) == []


@pytest.mark.parametrize(
    ("architecture", "plan", "against"),
    [
        ("GPT2LMHeadModel", {}, "no tensor-parallel plan for GPT2LMHeadModel"),
        ("LlamaForCausalLM", {"norm": "sequence_parallel"}, "does not serve: sequence_parallel"),
        ("LlamaForCausalLM", {"embed_tokens": ""}, "cuts the tied embedding and head"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(architecture: str, plan: Mapping[str, str], against: str) -> None:
    (problem,) = tensor_parallel_problems(whole(architecture, plan=plan), 2)
    assert against in problem.message
    assert problem.remedy == "set rollout.tensor_parallel to 1"


def test_an_embedding_of_its_own_may_stay_whole() -> None:
    assert tensor_parallel_problems(whole("LlamaForCausalLM", plan={"embed_tokens": ""}, tie=False), 2) == []


def local_numel(parameter: torch.Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def a_rank_has_its_slices(ranks: Ranks, architecture: str) -> tuple[int, int]:
    """Elements that the rank has of what is cut, and of the rest."""
    loaded = tiny_model(architecture)
    model = engine_skeleton(
        loaded.config,
        attention=NAMES["sdpa"],
        tp_mesh=tensor_parallel_mesh(ranks, 2, CPU),
        body_dtype=torch.bfloat16,
        head_dtype=torch.float32,
    )
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in model.parameters())
    materialise(model, CPU)
    embedding = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is embedding
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter is embedding else torch.bfloat16), name
        assert parameter.shape == loaded.get_parameter(name).shape
    for name, buffer in loaded.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    fill(model, loaded)
    cut = sum(local_numel(parameter) for parameter in model.parameters() if isinstance(parameter, DTensor))
    rest = sum(local_numel(parameter) for parameter in model.parameters() if not isinstance(parameter, DTensor))

    release(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not any(buffer.is_meta for buffer in model.buffers())
    materialise(model, CPU)
    assert sum(map(local_numel, model.parameters())) == cut + rest
    return cut, rest


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_rank_has_half_of_what_is_cut_until_it_is_released(ranks: RankProcesses, architecture: str) -> None:
    (cut, rest), other = ranks.run(a_rank_has_its_slices, 2, architecture)
    assert (cut, rest) == other
    total = sum(parameter.numel() for parameter in tiny_model(architecture).parameters())
    assert 2 * cut + rest == total
    assert rest < 0.05 * total  # norms, the experts' router


def test_a_whole_model_has_no_slices() -> None:
    assert sliced_linears(tiny_model()) == {}
