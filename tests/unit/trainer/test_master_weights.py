from __future__ import annotations

import pytest
import torch

from tandem.algorithm.losses import ClippedSurrogate
from tandem.trainer.master_weights import MasterWeights
from tandem.trainer.optim import Optimizer
from tests.tiny import tiny_model
from tests.unit.trainer.made import make_batch, make_rollouts, run_update, trainee

BF16 = torch.bfloat16


def test_in_float32_the_masters_are_the_model() -> None:
    learner = trainee()
    named = dict(learner.model.named_parameters())
    assert all(learner.weights.shards()[name].tensor is weight for name, weight in named.items())
    assert learner.weights.shards().keys() == named.keys()


def test_a_tied_head_is_float32_and_one_tensor() -> None:
    learner = trainee(body_dtype=BF16)
    head = learner.model.get_output_embeddings().weight
    assert head.dtype == torch.float32
    assert learner.model.get_input_embeddings().weight is head
    assert sum(weight is head for weight in learner.weights.parameters()) == 1
    others = [weight for weight in learner.model.parameters() if weight is not head]
    assert {weight.dtype for weight in others} == {BF16}


def test_an_untied_embedding_is_rounded_its_head_is_not() -> None:
    model = tiny_model(tie=False)
    MasterWeights(model, body_dtype=BF16, head_dtype=torch.float32)
    assert model.get_input_embeddings().weight.dtype == BF16
    assert model.get_output_embeddings().weight.dtype == torch.float32


def test_a_small_learning_rate_moves_masters_where_bfloat16_weights_would_not_move() -> None:
    """98 % of the updates are lost without masters, at lr 1e-6; with them, a hundred steps arrive in the model."""
    lr, steps = 1e-6, 100
    learner = trainee(body_dtype=BF16)
    name = "model.layers.0.mlp.up_proj.weight"
    compute, master = learner.model.get_parameter(name), learner.weights.shards()[name].tensor
    start = compute.detach().clone()
    alone = torch.nn.Parameter(start.clone())
    without_masters = torch.optim.AdamW([alone], lr=lr, weight_decay=0.0)
    learner.optimizer = Optimizer(learner.weights, max_grad_norm=1e9)
    generator = torch.Generator().manual_seed(0)
    slope = torch.randn(start.shape, generator=generator)
    for step in range(steps):
        master.grad = slope.clone()
        learner.optimizer.step(lr, loss_is_finite=True)
        if step == 0:
            alone.grad = slope.to(BF16)
            without_masters.step()
            assert (alone == start).float().mean() > 0.98
            assert (compute == start).float().mean() > 0.95
    moved = (master.detach() - start.float()).abs()
    assert moved.median() > 0.5 * lr * steps
    drift = ((compute.detach().float() - start.float()) * -slope.sign()).mean()
    assert 0.5 * lr * steps < float(drift) < 2 * lr * steps, "the rounded weights have not moved as the masters did"


def test_gradients_of_micro_batches_are_added_up_in_float32() -> None:
    """256 + 1 is 256 in bfloat16: the ninth bit is lost there, and every small micro-batch after a large one."""
    learner = trainee(body_dtype=BF16)
    name = "model.layers.0.mlp.up_proj.weight"
    compute, master = learner.model.get_parameter(name), learner.weights.shards()[name].tensor
    with learner.weights.collecting():
        for scale in (256.0, 1.0, 1.0, 1.0):
            (compute.float() * scale).sum().backward()
            assert compute.grad is None
        assert master.grad is not None
        assert master.grad.dtype == torch.float32
        assert torch.equal(master.grad, torch.full_like(master.grad, 259.0))
    assert master.grad is None


def test_a_backward_pass_of_ones_own_leaves_its_gradients_on_the_model() -> None:
    learner = trainee(body_dtype=BF16)
    name = "model.layers.0.mlp.up_proj.weight"
    compute, master = learner.model.get_parameter(name), learner.weights.shards()[name].tensor
    compute.float().sum().backward()
    assert compute.grad is not None
    assert master.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_an_update_begins_without_the_gradients_of_others(dtype: torch.dtype) -> None:
    batch = make_batch(make_rollouts(), on_policy=True)
    gradients = []
    for left_over in (False, True):
        learner = trainee(body_dtype=dtype, keep_gradient=True)
        if left_over:
            torch.stack([weight.float().sum() for weight in learner.model.parameters()]).sum().backward()
        run_update(learner, batch, ClippedSurrogate(0.2, 0.2))
        gradients += learner.optimizer.gradients
    assert torch.equal(*gradients)


def test_write_back_rounds_the_masters_into_the_model() -> None:
    learner = trainee(body_dtype=BF16)
    with torch.no_grad():
        for master in learner.weights.parameters():
            master.mul_(1.01)
    learner.weights.write_back()
    for name, compute in learner.model.named_parameters():
        assert torch.equal(compute, learner.weights.shards()[name].tensor.to(compute.dtype)), name
