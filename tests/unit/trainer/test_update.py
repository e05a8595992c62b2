"""The update itself: ratios, masks, non-finite numbers, empty steps, own losses, counters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.algorithm.function_loss import FunctionLoss
from tandem.algorithm.losses import ClippedSurrogate
from tandem.errors import TrainingError
from tandem.trainer.logprobs import batch_logprobs
from tandem.trainer.packing import PackingOptions
from tandem.trainer.update import UpdateOptions
from tests.unit.trainer.made import Trainee, make_batch, make_rollouts, run_update, trainee

SMALL = UpdateOptions(packing=PackingOptions("shared_prefix", 20))
NAN = float("nan")


def moments(learner: Trainee) -> dict[tuple[int, str], Tensor]:
    return {
        (number, name): value.clone()
        for number, weight in enumerate(learner.weights.parameters())
        for name, value in learner.optimizer.adamw.state[weight].items()
    }


def test_fault_08_advantages_outside_of_the_mask_do_not_make_an_update() -> None:
    batch = make_batch(make_rollouts(holes=True))
    idle = replace(batch, advantages=torch.where(batch.loss_mask, 0.0, NAN))
    assert run_update(trainee(), idle, ClippedSurrogate()).num_updates == 0
    active = replace(batch, advantages=torch.where(batch.loss_mask, batch.advantages, NAN))
    found, expected = (run_update(trainee(), given, ClippedSurrogate()) for given in (active, batch))
    assert (found.num_updates, found.loss) == (1, expected.loss)


def test_fault_12_on_policy_every_ratio_is_exactly_one() -> None:
    """Cut into many micro-batches, with a large learning rate: the ratio is to the update's own log-probs."""
    batch = make_batch(make_rollouts(), on_policy=True)
    result = run_update(trainee(), batch, ClippedSurrogate(), SMALL, lr=0.1)
    assert result.num_updates == 1
    assert result.ratio_mean == 1.0
    assert result.ratio_max == 1.0
    assert result.clip_fraction == 0.0
    assert result.ratio is not None
    assert torch.equal(result.ratio, batch.loss_mask.float())


@pytest.mark.parametrize("options", [{"epochs": 2}, {"mini_batch_responses": 6}], ids=str)
def test_fault_12_with_several_updates_the_ratio_is_to_the_policy_before_the_first(options: dict[str, int]) -> None:
    """Also where no old log-probs are given: the policy's own at each update would make every ratio 1."""
    rollouts = make_rollouts()
    several = replace(SMALL, **options)
    before = batch_logprobs(trainee().policy, rollouts, PackingOptions("none"))
    own, given = trainee(), trainee()
    result = run_update(own, make_batch(rollouts, on_policy=True), ClippedSurrogate(), several, lr=0.01)
    batch = replace(make_batch(rollouts), old_logprobs=before)
    expected = run_update(given, batch, ClippedSurrogate(), several, lr=0.01)
    assert result.num_updates == 2
    assert result.ratio_max > 1.01
    assert result.clip_fraction == pytest.approx(expected.clip_fraction)
    torch.testing.assert_close(result.ratio, expected.ratio, rtol=1e-3, atol=1e-3)
    assert result.ratio is not None
    assert result.logprobs is not None
    ratio = (result.logprobs - before).exp()[batch.loss_mask]
    torch.testing.assert_close(result.ratio[batch.loss_mask], ratio, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_tokens", [1, 10_000], ids=["two micro-batches", "one"])
def test_fault_07_the_token_mean_counts_tokens_not_responses(max_tokens: int) -> None:
    """A tenth of the tokens at loss 0.5, nine tenths at 0.3: 0.32, where the mean of the two means is 0.40."""
    rollouts = make_rollouts(prompt_lengths=(3,), response_lengths=((10, 90),))
    batch = replace(make_batch(rollouts, on_policy=True), advantages=torch.tensor([[0.5], [0.3]]))

    def advantage_as_loss(*, logprobs: Tensor, advantages: Tensor, **_: object) -> Tensor:
        return advantages + 0 * logprobs

    options = UpdateOptions(packing=PackingOptions("varlen", max_tokens))
    result = run_update(trainee(), batch, FunctionLoss(advantage_as_loss), options)
    assert result.loss == pytest.approx(0.32, rel=1e-6)


def test_fault_09_old_logprobs_50_away_give_a_finite_loss_and_gradient() -> None:
    batch = make_batch(make_rollouts(), reference=True)
    for distance in (-50.0, 50.0):
        far = replace(batch, old_logprobs=batch.old_logprobs + distance, ref_logprobs=batch.ref_logprobs - distance)
        learner = trainee()
        result = run_update(learner, far, ClippedSurrogate(clip_dual=3.0, kl_coef=0.1), SMALL)
        assert (result.num_updates, result.num_skipped) == (1, 0)
        assert math.isfinite(result.loss)
        assert bool(learner.vector().isfinite().all())


def test_a_mini_batch_without_signal_makes_no_optimizer_step() -> None:
    """Else AdamW's momentum would move the weights although nothing was learned."""
    rollouts = make_rollouts()
    options = UpdateOptions(mini_batch_responses=6, shuffle="none")
    learner = trainee()
    result = run_update(learner, make_batch(rollouts, idle=range(6, 12)), ClippedSurrogate(), options)
    assert (result.num_updates, result.num_skipped) == (1, 0)
    once = trainee()
    first = make_batch(rollouts)
    run_update(once, replace(first, loss_mask=first.loss_mask & (torch.arange(12) < 6)[:, None]), ClippedSurrogate())
    assert torch.equal(learner.vector(), once.vector())


@pytest.mark.parametrize("where", ["old_logprobs", "ref_logprobs", "advantages"])
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_fault_08_what_is_outside_of_the_mask_has_no_effect(where: str, value: float) -> None:
    rollouts = make_rollouts(holes=True)
    loss = ClippedSurrogate(kl_coef=0.1)
    batch = make_batch(rollouts, reference=True)
    advantages = batch.advantages.expand(batch.loss_mask.shape).clone()
    batch = replace(batch, advantages=torch.where(batch.loss_mask, advantages, 0.0))
    clean, dirty = trainee(), trainee()
    expected = run_update(clean, batch, loss, SMALL)
    matrix = vars(batch)[where]
    result = run_update(dirty, replace(batch, **{where: torch.where(batch.loss_mask, matrix, value)}), loss, SMALL)
    assert result.loss == expected.loss
    assert torch.equal(dirty.vector(), clean.vector())
    assert not torch.equal(clean.vector(), trainee().vector())


def test_fault_08_every_token_masked_leaves_the_weights_as_they_are() -> None:
    rollouts = make_rollouts()
    learner = trainee()
    before = learner.vector()
    batch = make_batch(rollouts, mask=torch.zeros_like(rollouts.response_mask), reference=True)
    result = run_update(learner, batch, ClippedSurrogate(kl_coef=0.1, entropy_coef=0.1))
    assert torch.equal(learner.vector(), before)
    assert (result.loss, result.num_updates, result.num_skipped) == (0.0, 0, 0)
    assert result.policy_version == 0, "the weights have not changed, so the version has not, either"


def test_fault_19_a_step_of_empty_responses_runs_on() -> None:
    """EOS at once, for all: one token each. Some of them differ in reward."""
    rollouts = make_rollouts(prompt_lengths=(3, 4), response_lengths=((1, 1, 1), (1, 1)))
    for packing in ("shared_prefix", "varlen", "none", "auto"):
        learner = trainee()
        options = UpdateOptions(packing=PackingOptions(packing))
        result = run_update(learner, make_batch(rollouts, on_policy=True), ClippedSurrogate(), options)
        assert result.num_updates == 1
        assert result.grad_norm > 0


def test_fault_19_a_step_without_any_advantage_runs_on() -> None:
    rollouts = make_rollouts()
    learner = trainee()
    batch = make_batch(rollouts, idle=range(len(rollouts)))
    result = run_update(learner, batch, ClippedSurrogate(), SMALL)
    assert (result.num_updates, result.num_skipped, result.loss) == (0, 0, 0.0)
    assert not [name for name, value in result.metrics.items() if value != value]


class Poisoned:
    """A loss that is not finite whenever its micro-batch holds a response with this advantage."""

    def __init__(self, advantage: float, *, in_gradient_only: bool) -> None:
        self.advantage = advantage
        self.in_gradient_only = in_gradient_only

    def __call__(self, *, logprobs: Tensor, advantages: Tensor, **_: object) -> Tensor:
        losses = -advantages * logprobs
        if bool((advantages == self.advantage).any()):
            zero = (logprobs - logprobs.detach()).abs()  # its square root is 0, with an infinite slope
            losses = losses + (zero.sqrt() if self.in_gradient_only else torch.inf)
        return losses


@pytest.mark.parametrize("in_gradient_only", [True, False])
def test_fault_10_an_infinite_gradient_in_one_micro_batch_skips_the_update(in_gradient_only: bool) -> None:
    learner, batch = trainee(), make_batch(make_rollouts(), on_policy=True)
    run_update(learner, batch, ClippedSurrogate(), SMALL)  # so that there are moments
    weights, before = learner.vector(), moments(learner)
    poison = Poisoned(float(batch.advantages[4]), in_gradient_only=in_gradient_only)
    result = run_update(learner, batch, FunctionLoss(poison), SMALL)
    assert (result.num_updates, result.num_skipped) == (0, 1)
    assert result.policy_version == 0
    assert torch.equal(learner.vector(), weights)
    after = moments(learner)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(weight.grad is None for weight in learner.weights.parameters())

    healthy = run_update(learner, batch, ClippedSurrogate(), SMALL)
    assert healthy.num_updates == 1
    assert learner.optimizer.skipped_in_row == 0
    assert not torch.equal(learner.vector(), weights)


def test_fault_10_after_a_set_number_in_a_row_training_stops_with_an_error() -> None:
    learner, batch = trainee(max_skipped=2), make_batch(make_rollouts(), on_policy=True)
    poison = FunctionLoss(Poisoned(float(batch.advantages[0]), in_gradient_only=False))
    for _ in range(2):
        assert run_update(learner, batch, poison, SMALL).num_skipped == 1
    with pytest.raises(TrainingError, match="3 updates in a row") as caught:
        run_update(learner, batch, poison, SMALL)
    assert "max_skipped_updates" in str(caught.value)


def test_gradients_of_an_update_that_was_broken_off_are_not_in_the_next_one() -> None:
    """An own loss that raises, or Ctrl-C in a notebook, in the second micro-batch: the first has gradients by then."""
    calls = 0

    def raises_at_the_second_call(*, logprobs: Tensor, **_: object) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError
        return -logprobs

    batch = make_batch(make_rollouts(), on_policy=True)
    learner, fresh = trainee(), trainee()
    with pytest.raises(ZeroDivisionError):
        run_update(learner, batch, FunctionLoss(raises_at_the_second_call), SMALL)
    assert all(weight.grad is None for weight in learner.weights.parameters())
    found, expected = (run_update(each, batch, ClippedSurrogate(), SMALL) for each in (learner, fresh))
    assert found.grad_norm == expected.grad_norm
    assert torch.equal(learner.vector(), fresh.vector())


def test_a_skipped_update_is_in_no_mean() -> None:
    """Of two mini-batches one is not finite: loss and grad_norm are those of the other."""
    rollouts = make_rollouts()
    options = replace(SMALL, mini_batch_responses=6, shuffle="none")
    batch = make_batch(rollouts, on_policy=True)
    poison = FunctionLoss(Poisoned(float(batch.advantages[8]), in_gradient_only=False))
    result = run_update(trainee(), batch, poison, options)
    assert (result.num_updates, result.num_skipped) == (1, 1)
    assert result.loss == result.loss
    assert 0 < result.grad_norm < float("inf")
    assert result.policy_version == 1


def test_an_own_loss_is_run_on_rows_without_advantage_too() -> None:
    """Only the surrogate is known to have no gradient there: an own loss may be anything, such as likelihood."""
    rollouts = make_rollouts()
    learner = trainee()
    before = learner.vector()

    def likelihood(*, logprobs: Tensor, **_: object) -> Tensor:
        return -logprobs

    result = run_update(learner, make_batch(rollouts, idle=range(len(rollouts))), FunctionLoss(likelihood), SMALL)
    assert result.num_updates == 1
    assert not torch.equal(learner.vector(), before)
    assert not bool(result.logprobs.isnan().any())

    promised = FunctionLoss(lambda *, logprobs, advantages, **_: -advantages * logprobs, idle_without_advantage=True)
    some = run_update(trainee(), make_batch(rollouts, idle=(0, 1)), promised, SMALL)
    assert some.logprobs.isnan().any(dim=1).nonzero().flatten().tolist() == [0, 1]


def test_results_are_laid_back_in_their_own_rows_after_shuffling() -> None:
    """The log-probs reported are those of a plain pass, row by row, whatever mini-batch a row was in."""
    rollouts = make_rollouts()
    options = UpdateOptions(PackingOptions("shared_prefix", 15), mini_batch_responses=4, shuffle="responses")
    result = run_update(trainee(), make_batch(rollouts, on_policy=True), ClippedSurrogate(), options, lr=1e-12)
    whole = run_update(trainee(), make_batch(rollouts, on_policy=True), ClippedSurrogate(), lr=1e-12)
    torch.testing.assert_close(result.logprobs, whole.logprobs, rtol=0, atol=2e-5)


def test_the_gap_to_the_engine_is_measured_before_the_first_update() -> None:
    rollouts = make_rollouts()
    options = UpdateOptions(PackingOptions("none"), mini_batch_responses=6, shuffle="none")
    result = run_update(trainee(), make_batch(rollouts, on_policy=True), ClippedSurrogate(), options, lr=1.0)
    first = slice(0, 6)
    mask = rollouts.response_mask[first]
    assert result.logprobs is not None
    gap = (result.logprobs[first] - rollouts.rollout_logprobs[first])[mask].abs()
    assert result.metrics["mismatch/logprob_diff_mean"] == pytest.approx(float(gap.mean()), rel=1e-5)
    assert result.metrics["mismatch/logprob_diff_max"] == pytest.approx(float(gap.max()), rel=1e-5)
