"""Weights of tokens with global denominators, and sums that ignore what stands outside of the mask."""

from __future__ import annotations

import pytest
import torch

from tandem.algorithm.masked import AGGREGATIONS, masked_mean, masked_sum, token_weights

# Where the types of arguments are checked at run time, a wrong name is a TypeError before it is a ValueError.
WRONG_NAME = (ValueError, TypeError)
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("aggregation", "expected_rows"),
    [
        ("token_mean", [1 / 7, 1 / 7, 1 / 7]),
        ("sequence_mean", [1 / 12, 1 / 6, 1 / 3]),
        ("token_sum", [1.0, 1.0, 1.0]),
        ("sequence_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("constant", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_weights_by_hand(aggregation, expected_rows):
    weights = token_weights(aggregation, MASK, constant=10, dtype=torch.float64)
    per_row = torch.tensor([expected_rows[0], expected_rows[1], 0.0, expected_rows[2]], dtype=torch.float64)
    torch.testing.assert_close(weights, per_row[:, None] * MASK, rtol=0, atol=1e-15)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_do_not_depend_on_padding_or_on_empty_responses(aggregation):
    padded = torch.zeros(6, 9, dtype=torch.bool)
    padded[:4, :4] = MASK
    wide = token_weights(aggregation, padded, constant=10)
    torch.testing.assert_close(wide[:4, :4], token_weights(aggregation, MASK, constant=10), rtol=0, atol=0)
    assert not wide[4:].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_fault_08_every_token_masked_gives_weights_of_zero(aggregation):
    weights = token_weights(aggregation, torch.zeros(3, 4, dtype=torch.bool), constant=10)
    assert torch.equal(weights, torch.zeros(3, 4))


def test_fault_07_token_mean_counts_tokens_not_responses():
    mask = torch.zeros(2, 900, dtype=torch.bool)
    mask[0, :100] = True
    mask[1] = True
    losses = torch.tensor([[0.5], [0.3]], dtype=torch.float64).expand(2, 900)
    loss = (token_weights("token_mean", mask, dtype=torch.float64) * losses).sum()
    assert loss.item() == pytest.approx(0.32, abs=1e-12)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", 1.0), ("sequence_mean", 1.0), ("sequence_sum", 2.0), ("constant", 0.5), ("token_sum", 2.0)],
)
def test_fault_06_truncated_responses_leave_the_denominator_too(aggregation, expected):
    response_mask = torch.tensor([[True, True, False], [True, True, True]])
    mask = response_mask & torch.tensor([[True], [False]])
    losses = torch.tensor([[1.0, 1.0, 0.0], [9.0, 9.0, 9.0]])
    assert (token_weights(aggregation, mask, constant=4) * losses).sum().item() == pytest.approx(expected)


def test_an_unknown_aggregation_names_the_known_ones():
    with pytest.raises(WRONG_NAME, match=r"token_mean.*sequence_mean.*token_sum.*sequence_sum.*constant"):
        token_weights("token-mean", MASK)


@pytest.mark.parametrize("constant", [None, 0, -1])
def test_constant_aggregation_needs_a_positive_number(constant):
    with pytest.raises(ValueError, match="positive number of tokens"):
        token_weights("constant", MASK, constant=constant)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_fault_08_what_is_outside_of_the_mask_reaches_neither_value_nor_gradient(poison):
    values = torch.tensor([1.0, poison, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    mean = masked_mean(values, mask)
    mean.backward()
    assert mean.item() == 2.0
    assert torch.equal(values.grad, torch.tensor([0.5, 0.0, 0.5]))
    assert masked_sum(values, mask).item() == 4.0


def test_masked_mean_over_rows_is_zero_for_a_row_without_tokens():
    values = torch.arange(16.0).view(4, 4)
    assert torch.equal(masked_mean(values, MASK, dim=1), torch.tensor([1.5, 5.0, 0.0, 12.0]))
    assert torch.equal(masked_sum(values, MASK, dim=1), torch.tensor([6.0, 10.0, 0.0, 12.0]))
