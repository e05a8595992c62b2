"""What a response loses for its length."""

from __future__ import annotations

import pytest
import torch

from tandem.algorithm.overlong import overlong_penalty


def test_it_grows_by_the_token_from_the_buffer_on_and_ends_at_the_limit() -> None:
    """DAPO's own numbers: 16,384 expected tokens, and 4,096 more in which the price grows."""
    lengths = torch.tensor([0, 1, 16383, 16384, 16385, 18432, 20479, 20480])
    expected = [0.0, 0.0, 0.0, 0.0, 1 / 4096, 0.5, 4095 / 4096, 1.0]
    assert overlong_penalty(lengths, max_length=20480, buffer=4096).tolist() == expected


@pytest.mark.parametrize("buffer", [1, 3, 7, 10])
def test_equation_13_by_itself(buffer: int) -> None:
    """In plain Python, for each length; the paper's is a reward, so it has the other sign. Tolerance: rounding."""

    def soft_punishment(length: int, limit: int) -> float:
        if length <= limit - buffer:
            return 0.0
        return ((limit - buffer) - length) / buffer if length <= limit else -1.0

    found = overlong_penalty(torch.arange(12), max_length=10, buffer=buffer, penalty=2.5)
    assert found.tolist() == pytest.approx([-2.5 * soft_punishment(length, 10) for length in range(12)], rel=1e-6)


def test_fault_11_a_buffer_of_no_tokens_is_off() -> None:
    penalty = overlong_penalty(torch.tensor([0, 5, 10, 11]), max_length=10, buffer=0)
    assert penalty.tolist() == [0.0] * 4


def test_no_response_at_all() -> None:
    assert overlong_penalty(torch.zeros(0, dtype=torch.int64), max_length=10, buffer=2).shape == (0,)
