"""A model on several ranks computes and learns what it does on one."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.errors import ModelError
from tandem.model.attention import register
from tandem.model.precision import round_weights
from tandem.model.ranks import Ranks
from tandem.model.skeleton import skeleton
from tandem.trainer.fsdp import ShardedWeights, training_mesh
from tandem.trainer.master_weights import MasterWeights
from tandem.trainer.offload import Offload
from tandem.trainer.optim import Optimizer
from tandem.trainer.packing import pack
from tandem.trainer.policy import Policy
from tandem.trainer.weights import Weights
from tests.ranks import RankProcesses
from tests.tiny import ARCHITECTURES
from tests.unit.trainer.made import advantages_of, make_rollouts
from tests.unit.trainer.spread import (
    CPU,
    contents,
    difference,
    gradient_of,
    gradients,
    held_bytes,
    spread,
    whole_model,
)

BF16 = torch.bfloat16
MICRO_BATCHES = ([0, 1, 2], [3, 4, 5], [6, 7], [8, 9, 10], [11])  # on two ranks one is empty, on four three are


def run(policy: Policy, rows: list[int]) -> Tensor:
    """Log-probs of these rows' tokens, times the rows' advantages; with no rows a pass for the others' sake."""
    rollouts = make_rollouts()
    row = pack(rollouts, rows, packing="varlen", costs=policy.costs(), device=CPU)
    logprobs, _ = policy(row, temperature=0.7, entropy_gradient=False)
    return row.to_matrix(logprobs) * advantages_of(rollouts)[rows]


def backward(policy: Policy, ranks: Ranks) -> None:
    """All micro-batches, in turns with the other ranks."""
    padded = [*MICRO_BATCHES, *([[]] * (-len(MICRO_BATCHES) % ranks.size))]
    for rows in padded[ranks.rank :: ranks.size]:
        run(policy, rows).sum().backward()


def learn(
    policy: Policy, weights: Weights, ranks: Ranks, *, max_grad_norm: float = 1e9
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Two optimizer steps; norms and gradients, before clipping."""
    optimizer = Optimizer(weights, weight_decay=0.1, max_grad_norm=max_grad_norm)
    norms, each_gradients = [], []
    with weights.collecting():
        for lr in (1e-3, 2e-3):
            backward(policy, ranks)
            each_gradients.append(gradients(weights))
            norms.append(optimizer.step(lr, loss_is_finite=True).grad_norm)
    return norms, each_gradients


def compare(
    ranks: Ranks,
    architecture: str = "Qwen3ForCausalLM",
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    tie: bool = True,
    max_grad_norm: float = 1e9,
) -> dict[str, Any]:
    """Run by each rank: the same two steps on one rank and on all of them. `options` are those of `spread`."""
    warnings.simplefilter("error")
    model = whole_model(architecture, tie=tie)
    spread_policy, spread_weights = spread(ranks, model, chunk_tokens=16, **options)
    weights = MasterWeights(model, body_dtype=spread_policy.body_dtype, head_dtype=torch.float32)
    policy = Policy(model, chunk_tokens=16)
    with torch.no_grad():
        before = float((run(policy, [0, 1, 2]) - run(spread_policy, [0, 1, 2])).abs().max())
    norms, whole_gradients = learn(policy, weights, Ranks(), max_grad_norm=max_grad_norm)
    spread_norms, own_gradients = learn(spread_policy, spread_weights, ranks, max_grad_norm=max_grad_norm)
    shards = spread_weights.shards()
    with torch.no_grad():
        after = float((run(policy, [0, 1, 2]) - run(spread_policy, [0, 1, 2])).abs().max())
    return {
        "before": before,
        "after": after,
        "gradients": [difference(*each, shards) for each in zip(own_gradients, whole_gradients, strict=True)],
        "weights": difference(contents(spread_weights), contents(weights), shards),
        "norms": norms,
        "spread_norms": spread_norms,
    }


def check(
    results: list[dict[str, Any]], *, gradients: float = 2e-6, weights: float = 1e-6, logprobs: float = 1e-5
) -> None:
    """Tolerances: of all gradients and of all weights together, norm of the difference over norm; of a log-prob."""
    for each in results:
        assert each["before"] == 0.0, "the same products in the same order"
        assert max(each["gradients"]) < gradients
        assert each["spread_norms"] == pytest.approx(each["norms"], rel=gradients)
        assert each["spread_norms"] == results[0]["spread_norms"], "the same bits on every rank"
        assert each["weights"] < weights
        assert each["after"] < logprobs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_take_the_steps_of_one(ranks: RankProcesses, architecture: str) -> None:
    # GPT-2 has biases on its keys. Their gradient is 0 but for rounding, and AdamW takes a full step along its sign.
    check(ranks.run(compare, 2, architecture), weights=1e-3 if architecture == "GPT2LMHeadModel" else 1e-6)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel"])
def test_a_head_of_its_own(ranks: RankProcesses, architecture: str) -> None:
    results = ranks.run(functools.partial(compare, tie=False), 2, architecture)
    check(results, weights=1e-3 if architecture == "GPT2LMHeadModel" else 1e-6)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_in_bfloat16(ranks: RankProcesses, architecture: str, *, tie: bool) -> None:
    """Body in bfloat16, head and gradients in float32, as on one rank.

    Log-probs after two steps may differ more: a last bit of a master decides to which side its weight is rounded.
    """
    results = ranks.run(functools.partial(compare, tie=tie), 2, architecture, {"body_dtype": BF16})
    check(results, logprobs=1e-2)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_four_ranks(ranks: RankProcesses, replicas: int) -> None:
    """Three of them run a micro-batch without rows. Several replicas: HSDP."""
    check(ranks.run(compare, 4, "Qwen3ForCausalLM", {"replicas": replicas}))


def test_clipping_is_by_the_norm_over_all_ranks(ranks: RankProcesses) -> None:
    results = ranks.run(functools.partial(compare, max_grad_norm=1.0), 2, "Qwen3ForCausalLM")
    check(results)
    assert min(results[0]["norms"]) > 10


def test_activations_computed_again_give_the_same_gradients(ranks: RankProcesses) -> None:
    check(ranks.run(compare, 2, "Qwen3ForCausalLM", {"checkpointing": True}))
    check(ranks.run(compare, 2, "Qwen3ForCausalLM", {"checkpointing": True, "body_dtype": BF16}), logprobs=1e-2)


@pytest.mark.parametrize(("size", "replicas"), [(3, 1), (4, 2), (4, 1)])
def test_shards_say_which_rows_they_are(ranks: RankProcesses, size: int, replicas: int) -> None:
    """Four experts on three ranks are 2, 2 and none; 104 words are 35, 35 and 34."""

    def pieces(ranks: Ranks, replicas: int) -> dict[str, tuple[tuple[int, ...], int, int, bool]]:
        model = whole_model("Qwen3MoeForCausalLM")
        _, weights = spread(ranks, model, replicas=replicas)
        shards = weights.shards()
        names = dict(model.named_parameters())
        assert shards.keys() == names.keys(), "a tied tensor is there once"
        assert [id(shard.tensor) for shard in shards.values()] == [id(each) for each in weights.parameters()]
        assert all(type(each) is torch.nn.Parameter and each.is_contiguous() for each in weights.parameters())
        return {
            name: (shard.shape, shard.first_row, len(shard.tensor), shard.primary)
            for name, shard in shards.items()
            if shard.shape == tuple(names[name].shape) and shard.tensor.dtype == torch.float32
        }

    results = ranks.run(pieces, size, replicas)
    names = dict(whole_model("Qwen3MoeForCausalLM").named_parameters())
    for name, parameter in names.items():
        primary = [each[name] for each in results if each[name][3]]
        rows = [row for _, first, count, _ in primary for row in range(first, first + count)]
        assert rows == list(range(len(parameter))), name
        others = [each[name][:3] for each in results if not each[name][3]]
        assert others == [each[:3] for each in primary] * (replicas - 1), name


def test_fault_10_infinity_on_one_rank_stops_the_step_on_all(ranks: RankProcesses) -> None:
    def skip(ranks: Ranks) -> tuple[bool, bool, float]:
        policy, weights = spread(ranks, whole_model())
        optimizer = Optimizer(weights)
        with weights.collecting():
            backward(policy, ranks)
            optimizer.step(1e-3, loss_is_finite=True)
            before = contents(weights)
            moments = [optimizer.adamw.state[each]["exp_avg"].clone() for each in weights.parameters()]
            backward(policy, ranks)
            if ranks.rank == 1:
                gradient_of(next(weights.parameters()))[0, 0] = math.inf
            outcome = optimizer.step(1e-3, loss_is_finite=True)
        after = [optimizer.adamw.state[each]["exp_avg"] for each in weights.parameters()]
        same = all(map(torch.equal, moments, after)) and all(
            torch.equal(before[name], rows) for name, rows in contents(weights).items()
        )
        return outcome.taken, same, outcome.grad_norm

    assert ranks.run(skip, 2) == [(False, True, math.inf)] * 2


def test_an_update_begins_and_ends_without_gradients(ranks: RankProcesses) -> None:
    def left(ranks: Ranks) -> list[bool]:
        policy, weights = spread(ranks, whole_model())
        backward(policy, ranks)  # of somebody else, outside of an update
        with weights.collecting():
            backward(policy, ranks)
            first = gradients(weights)
        with weights.collecting():
            backward(policy, ranks)
            second = gradients(weights)
        everywhere = (*policy.parameters(), *weights.parameters())
        return [
            all(torch.equal(first[name], second[name]) for name in first),
            all(parameter.grad is None for parameter in everywhere),
        ]

    assert ranks.run(left, 2) == [[True, True]] * 2


def test_a_head_that_changes_between_passes_without_gradients_is_seen(ranks: RankProcesses) -> None:
    """FSDP keeps the head's weights after a forward pass, for a backward pass that does not come here."""

    def passes(ranks: Ranks) -> float:
        policy, weights = spread(ranks, whole_model())
        with torch.no_grad():
            before = run(policy, [0])
            weights.shards()["model.embed_tokens.weight"].tensor.mul_(1.5)
            after = run(policy, [0])
        return float((before - after).abs().max())

    assert min(ranks.run(passes, 2)) > 0.1


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else [result]:
            if type(each) is Tensor and not each.is_meta:
                self.num_bytes = max(self.num_bytes, each.numel() * each.itemsize)
        return result


@pytest.mark.parametrize("size", [2, 4])
def test_no_rank_ever_has_the_whole_model(ranks: RankProcesses, size: int) -> None:
    """Made: its rows. While it runs: its rows, a layer or two, and the head. After a step: its rows and moments."""

    def held(ranks: Ranks) -> dict[str, int]:
        register()
        config = whole_model(overrides={"num_hidden_layers": 12}).config
        start = held_bytes()
        policy = Policy(skeleton(config), chunk_tokens=16)
        mesh = training_mesh(ranks, replicas=1, device=CPU)
        with Largest() as largest:
            weights = ShardedWeights(policy, mesh, head_dtype=torch.float32, device=CPU)
        sizes = {"largest made": largest.num_bytes, "made": held_bytes() - start}
        with torch.no_grad():
            for parameter in weights.parameters():
                parameter.normal_(std=0.02)

        def note(key: str) -> None:
            if key not in sizes:
                sizes[key] = held_bytes() - start

        def note_at_the_end_of_the_way_back(module: torch.nn.Module, args: object, embeddings: Tensor) -> None:
            if embeddings.requires_grad:
                embeddings.register_hook(lambda _: note("at the end of the way back"))

        body = policy.model.base_model
        body.norm.register_forward_hook(lambda *_: note("at the end of the body"))
        body.embed_tokens.register_forward_hook(note_at_the_end_of_the_way_back)
        optimizer = Optimizer(weights)
        with torch.no_grad():
            run(policy, [0])
        note("after a forward pass")
        with weights.collecting():
            backward(policy, ranks)
            note("with gradients")
            optimizer.step(1e-3, loss_is_finite=True)
        note("after a step")
        shapes = [shard.shape for shard in weights.shards().values()]
        sizes["model"] = sum(4 * math.prod(shape) for shape in shapes)
        sizes["largest tensor"] = max(4 * math.prod(shape) for shape in shapes)
        sizes["layer"] = 4 * sum(parameter.numel() for parameter in body.layers[0].parameters())
        return sizes

    for sizes in ranks.run(held, size):
        share, layer, head = sizes["model"] / size, sizes["layer"], sizes["largest tensor"]
        assert sizes["largest made"] <= head / size
        assert sizes["made"] < 1.05 * share
        assert sizes["at the end of the body"] < share + 2.5 * layer + head
        assert sizes["after a forward pass"] < 1.05 * share
        assert sizes["at the end of the way back"] < 2 * share + 2.5 * layer + 2 * head
        assert sizes["with gradients"] < 2.05 * share
        assert sizes["after a step"] < 3.05 * share


def test_a_reference_has_no_gradients_and_its_numbers_are_those_of_the_whole(ranks: RankProcesses) -> None:
    def reference(ranks: Ranks) -> tuple[float, bool]:
        model = whole_model()
        policy, _ = spread(ranks, model, body_dtype=BF16, trainable=False)
        round_weights(model, body_dtype=BF16, head_dtype=torch.float32)
        with torch.no_grad():
            off = run(Policy(model, chunk_tokens=1024), [0, 1]) - run(policy, [0, 1])
        return float(off.abs().max()), any(parameter.requires_grad for parameter in policy.parameters())

    assert ranks.run(reference, 2) == [(0.0, False)] * 2


@pytest.mark.parametrize("before_first_pass", [True, False])
def test_rows_may_leave_the_memory_between_phases(
    ranks: RankProcesses, before_first_pass: bool, tmp_path: Path
) -> None:
    def away(ranks: Ranks) -> tuple[int, bool]:
        policy, weights = spread(ranks, whole_model())
        if not before_first_pass:
            backward(policy, ranks)
        offload, before = Offload("disk", tmp_path), held_bytes()
        offload.away(weights.freeable())
        assert all(each.untyped_storage().nbytes() == 0 for each in weights.parameters())
        freed = before - held_bytes()
        offload.back()
        other, other_weights = spread(ranks, whole_model())
        norms, _ = learn(policy, weights, ranks)
        expected, _ = learn(other, other_weights, ranks)
        rows, expected_rows = contents(weights), contents(other_weights)
        return freed, norms == expected and all(torch.equal(rows[name], expected_rows[name]) for name in rows)

    num_bytes = 4 * sum(parameter.numel() for parameter in whole_model().parameters())
    assert ranks.run(away, 2) == [(num_bytes // 2, True)] * 2


def test_a_model_whose_layers_cannot_be_found_is_refused(ranks: RankProcesses) -> None:
    def refused(ranks: Ranks) -> str:
        model = skeleton(whole_model().config)
        model.config.num_hidden_layers = 7
        policy = Policy(model, chunk_tokens=16)
        mesh = training_mesh(ranks, replicas=1, device=CPU)
        with pytest.raises(ModelError) as caught:
            ShardedWeights(policy, mesh, head_dtype=torch.float32, device=CPU)
        return str(caught.value)

    assert "no list of its 7 layers" in ranks.run(refused, 2)[0]
