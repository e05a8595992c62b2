"""What flows between the steps knows which tokens count, and which groups have something to teach."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.batch import with_contrast
from tests.unit.observe.made import made_rollouts


def test_cut_off_responses_are_in_the_loss_unless_they_are_masked() -> None:
    rollouts = made_rollouts(((3, 1), (2, 0)))  # the first one is cut off
    assert rollouts.loss_mask(mask_truncated=False).sum(dim=1).tolist() == [3, 1, 2, 0]
    assert rollouts.loss_mask(mask_truncated=True).sum(dim=1).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contrast_is_a_difference_between_two_valid_rewards_of_a_group(dtype: torch.dtype) -> None:
    """By group: two that differ; equal ones; one beside an invalid one; no valid one; no response at all; negatives."""
    rewards = torch.tensor([1.0, 2.0, 0.35, 0.35, 5.0, math.nan, 1.0, 2.0, -1.0, -2.0], dtype=dtype)
    valid = torch.tensor([True, True, True, True, True, False, False, False, True, True])
    group_ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 5, 5])
    assert with_contrast(rewards, valid, group_ids, 6).tolist() == [True, False, False, False, False, True]
