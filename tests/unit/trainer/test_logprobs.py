from __future__ import annotations

import pytest
import torch

import tandem as td
from tandem.errors import ModelError
from tandem.model.forward import body_dtype
from tandem.trainer.logprobs import batch_logprobs, response_logprobs
from tandem.trainer.packing import PackingOptions
from tests.tiny import tiny_model
from tests.unit.trainer.made import advantages_of, make_batch, make_rollouts, run_update, trainee


@pytest.mark.parametrize("max_tokens", [1, 20, 10_000])
def test_with_and_without_gradients_they_are_the_same(max_tokens: int) -> None:
    rollouts = make_rollouts()
    learner = trainee()
    with_gradient = response_logprobs(learner.model, rollouts)
    without = batch_logprobs(learner.policy, rollouts, PackingOptions("auto", max_tokens))
    assert with_gradient.requires_grad
    assert not without.requires_grad
    torch.testing.assert_close(without, with_gradient.detach(), rtol=0, atol=2e-5)
    beyond = torch.arange(rollouts.response_tokens.shape[1]) >= rollouts.response_lengths[:, None]
    assert not without[beyond].any()
    assert without[~beyond].max() < 0


def test_a_loop_of_ones_own_has_the_gradient_of_the_trainer() -> None:
    """response_logprobs and grpo_loss, as the README shows them, against TrainPhase's own path."""
    rollouts = make_rollouts()
    advantages = advantages_of(rollouts)[:, 0]
    mine = trainee()
    logprobs = td.response_logprobs(mine.model, rollouts)
    td.grpo_loss(logprobs, logprobs.detach(), advantages, rollouts.response_mask).backward()

    own = trainee(keep_gradient=True)
    run_update(own, make_batch(rollouts, on_policy=True), td.ClippedSurrogate(0.2, 0.2))
    [expected] = own.optimizer.gradients
    assert (mine.gradient() - expected).norm() / expected.norm() < 1e-5


def test_a_model_with_another_attention_is_refused_with_the_remedy() -> None:
    with pytest.raises(ModelError, match="'eager', not Tandem's") as caught:
        response_logprobs(tiny_model(), make_rollouts())
    assert "td.start(path).model" in str(caught.value)


def test_gradients_of_a_bfloat16_model_are_refused_with_the_remedy() -> None:
    """A loop of one's own on it trained the head only, without a word."""
    learner, rollouts = trainee(body_dtype=torch.bfloat16), make_rollouts()
    with pytest.raises(ModelError, match="not all float32") as caught:
        response_logprobs(learner.model, rollouts)
    assert '{"model": {"dtype": "float32"}}' in str(caught.value)
    with torch.no_grad():
        assert response_logprobs(learner.model, rollouts).isfinite().all()


def test_the_dtype_of_the_body_is_not_that_of_a_tied_head() -> None:
    assert body_dtype(trainee(body_dtype=torch.bfloat16).model) == torch.bfloat16
    assert body_dtype(trainee().model) == torch.float32
