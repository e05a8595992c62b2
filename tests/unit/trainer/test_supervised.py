from __future__ import annotations

import pytest
import torch

from tandem.batch import Rollouts
from tandem.trainer.packing import PackingOptions
from tandem.trainer.supervised import answers_as_rollouts, supervised_update
from tests.tiny import tiny_model
from tests.unit.trainer.made import KeepGradient, trainee

EOS = 1
EXAMPLES = answers_as_rollouts([[5, 6, 7, 8], [9], [5, 6, 7, 8]], [[10, 11, EOS], [12, 13, 14, 15, EOS], [EOS]])


def manual(examples: Rollouts) -> tuple[float, torch.Tensor]:
    """Mean cross entropy over all answer tokens, one sequence at a time in plain transformers, and its gradient."""
    model = tiny_model()
    total, count = torch.zeros(()), 0
    for row, prompt in enumerate(examples.prompts):
        answer = examples.response_tokens[row, : examples.response_lengths[row]].tolist()
        logits = model(torch.tensor([[*prompt.tokens, *answer]])).logits[0, len(prompt.tokens) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
        count += len(answer)
    loss = total / count
    loss.backward()
    return float(loss.detach()), torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.mark.parametrize("packing", [PackingOptions("none"), PackingOptions("auto", 8), PackingOptions("varlen", 100)])
def test_loss_and_gradient_are_those_of_cross_entropy(packing: PackingOptions) -> None:
    learner = trainee(keep_gradient=True)
    loss = supervised_update(learner.policy, learner.optimizer, EXAMPLES, packing, lr=1e-3)
    expected_loss, expected = manual(EXAMPLES)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert isinstance(learner.optimizer, KeepGradient)
    [gradient] = learner.optimizer.gradients
    assert (gradient - expected).norm() / expected.norm() < 1e-5


def test_fault_18_an_answer_of_one_token_enters_the_loss() -> None:
    learner = trainee()
    before = learner.vector()
    only = answers_as_rollouts([[5, 6]], [[EOS]])
    losses = [supervised_update(learner.policy, learner.optimizer, only, PackingOptions(), lr=1e-2) for _ in range(3)]
    assert losses[0] == pytest.approx(manual(only)[0], rel=1e-5)
    assert losses[0] > losses[1] > losses[2]
    assert not torch.equal(learner.vector(), before)


@pytest.mark.parametrize(("prompts", "answers"), [([[5]], [[]]), ([[]], [[EOS]]), ([[5]], [[EOS], [EOS]])])
def test_prompts_and_answers_that_are_empty_or_do_not_fit_are_refused(
    prompts: list[list[int]], answers: list[list[int]]
) -> None:
    with pytest.raises(ValueError, match="each prompt needs one answer"):
        answers_as_rollouts(prompts, answers)
