"""Drawing a token: exact frequencies, no token of probability 0, log-probs of the full distribution."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithm.categorical import selected_logprobs_and_entropy
from tandem.rollout.noise import uniform_noise
from tandem.rollout.options import SamplingOptions
from tandem.rollout.sampler import BLOCK, draw, restrict

ALMOST_ONE = 1.0 - 2.0**-53


def options(**changes: object) -> SamplingOptions:
    return SamplingOptions(n=1, max_response_length=1, **changes)


def random_logits(rows: int, vocabulary: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * scale


def even_noise(rows: int) -> torch.Tensor:
    """The middles of `rows` equal parts of [0, 1): frequencies are then as exact as can be."""
    return (torch.arange(rows, dtype=torch.float64) + 0.5) / rows


@pytest.mark.parametrize("vocabulary", [1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1009])
def test_frequencies_are_the_probabilities(vocabulary: int) -> None:
    rows = 4096
    logits = random_logits(1, vocabulary)
    tokens, _ = draw(logits.repeat(rows, 1), even_noise(rows), options())
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    expected = logits[0].double().softmax(-1) * rows
    # Cutting [0, 1) evenly, each token gets its share, give or take one.
    assert float((counts - expected).abs().max()) <= 1.0 + 1e-3


def test_frequencies_with_the_noise_of_a_run_pass_a_chi_square_test() -> None:
    rows, vocabulary = 20_000, 20
    logits = random_logits(1, vocabulary, scale=1.0)
    noise = uniform_noise(1, 2, torch.arange(rows), torch.tensor(0), torch.tensor(0))
    tokens, _ = draw(logits.repeat(rows, 1), noise, options(temperature=0.7))
    expected = (logits[0].double() / 0.7).softmax(-1) * rows
    chi_square = float(((torch.bincount(tokens, minlength=vocabulary) - expected) ** 2 / expected).sum())
    assert chi_square < 43.8  # 19 degrees of freedom, 0.1 %


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.1])
def test_the_logprob_is_the_trainers_also_where_all_logits_are_large(temperature: float) -> None:
    """Dividing by the temperature before subtracting the largest would round what the two have in common."""
    logits = random_logits(64, 1009) + 5000.0
    tokens, logprobs = draw(logits.clone(), even_noise(64), options(temperature=temperature))
    expected, _ = selected_logprobs_and_entropy(logits, tokens, temperature=temperature)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=5e-6)


def test_small_tokens_of_a_large_peaked_vocabulary_can_be_drawn() -> None:
    """A float32 cumulative sum rounds most of these to nothing."""
    vocabulary = 151_936
    logits = torch.full((1, vocabulary), -19.0)
    logits[0, 0] = 0.0
    weights = logits[0].double().exp()
    upto = weights.cumsum(-1) / weights.sum()
    wanted = torch.tensor([1, 1_000, 77_777, 151_000, vocabulary - 1])
    middle = upto[wanted] - weights[wanted] / weights.sum() / 2
    tokens, logprobs = draw(logits.repeat(5, 1), middle, options())
    assert (tokens - wanted).abs().max() <= 1  # a block sum in float32 may move a border by a fraction of a token
    torch.testing.assert_close(logprobs, logits[0].double().log_softmax(-1)[tokens].float())


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("vocabulary", [5, BLOCK, 2 * BLOCK + 3])
def test_a_token_of_probability_zero_is_never_returned(uniform: float, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = random_logits(200, vocabulary)
    dead = torch.rand(200, vocabulary, generator=generator) < 0.7
    dead[:100, 0] = dead[:100, -1] = True
    dead[:50, -3:] = dead[:50, :2] = True
    dead[:, vocabulary // 2] = False
    logits[dead] = -math.inf
    tokens, logprobs = draw(logits.clone(), torch.full((200,), uniform, dtype=torch.float64), options())
    assert not dead.gather(1, tokens[:, None]).any()
    assert logprobs.isfinite().all()


def test_top_k_returns_only_the_k_most_likely() -> None:
    logits = random_logits(1, 300)
    tokens, _ = draw(logits.repeat(500, 1), even_noise(500), options(top_k=4))
    assert set(tokens.tolist()) == set(logits[0].topk(4).indices.tolist())


def test_top_k_keeps_ties_and_may_exceed_the_vocabulary() -> None:
    weights = torch.tensor([[3.0, 2.0, 2.0, 1.0]])
    assert restrict(weights, 2, 1.0).tolist() == [[3.0, 2.0, 2.0, 0.0]]
    assert restrict(weights, 9, 1.0).tolist() == weights.tolist()


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    weights = torch.tensor([[1.0, 4.0, 2.0, 3.0]])  # of 10
    assert restrict(weights, None, 0.4).tolist() == [[0.0, 4.0, 0.0, 0.0]]
    assert restrict(weights, None, 0.41).tolist() == [[0.0, 4.0, 0.0, 3.0]]
    assert restrict(weights, None, 0.95).tolist() == weights.tolist()
    assert restrict(weights, None, 1e-9).tolist() == [[0.0, 4.0, 0.0, 0.0]]
    assert restrict(weights, 2, 0.55).tolist() == [[0.0, 4.0, 0.0, 0.0]]  # 4 of 7 is enough after top-k


def test_fault_21_logprobs_are_those_of_the_temperature() -> None:
    logits = random_logits(64, 200)
    tokens, logprobs = draw(logits.clone(), even_noise(64), options(temperature=0.7))
    expected = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.5, "top_k": 5}])
def test_fault_22_logprobs_are_of_the_full_distribution_under_top_p_and_top_k(changes: dict[str, float]) -> None:
    logits = random_logits(64, 200)
    tokens, logprobs = draw(logits.clone(), even_noise(64), options(temperature=1.3, **changes))
    expected = (logits / 1.3).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=5e-6)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = random_logits(32, 500)
    tokens, logprobs = draw(logits.clone(), even_noise(32), options(temperature=0.0, top_k=3))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1), rtol=0, atol=5e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_give_a_logprob_that_tells(bad: float) -> None:
    logits = random_logits(3, 200)
    logits[1, 150] = bad
    tokens, logprobs = draw(logits, even_noise(3), options())
    assert logprobs.isnan().tolist() == [False, True, False]
    assert int(tokens.max()) < 200


def test_wrong_options_are_all_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"n is 0.*temperature is -1.*top_p is 0.*top_k is 0.*empty string"):
        SamplingOptions(n=0, max_response_length=5, temperature=-1.0, top_p=0.0, top_k=0, stop=("a", ""))
