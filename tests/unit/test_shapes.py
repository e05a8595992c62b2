"""The shapes in signatures are checked while tests run."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from tandem.algorithm.losses import grpo_loss
from tandem.algorithm.masked import masked_sum


def test_a_wrong_shape_or_kind_of_tensor_is_caught() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert float(masked_sum(torch.ones(2, 3), mask)) == 6.0
    for values, wrong_mask in ((torch.ones(2, 4), mask), (torch.ones(2, 3), mask.float())):
        with pytest.raises(TypeCheckError):
            masked_sum(values, wrong_mask)


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_what_may_be_broadcast_is_let_through(shape: tuple[int, ...]) -> None:
    logprobs = torch.zeros(2, 3)
    loss = grpo_loss(logprobs, logprobs, torch.ones(shape), torch.ones(2, 3, dtype=torch.bool))
    assert float(loss) == -1.0
