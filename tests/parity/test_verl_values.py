"""Agreement of the critic's loss with verl 0.9.1 on recorded values: the family `value/`, whole."""

from __future__ import annotations

import pytest
import torch

from tandem.algorithm.masked import masked_mean, masked_sum, token_weights
from tandem.algorithm.value_loss import clipped_value_loss
from tests.parity.verl import AGGREGATION, CLOSE, MASK, VECTORS, batch, family, literal, tensor


@pytest.mark.parametrize("name", family("value/"))
def test_same_value_as_verl(name):
    options, expected = literal(VECTORS[name]), VECTORS[name]["output"]
    clip = options["cliprange_value"]
    ours = clipped_value_loss(batch("vpreds"), batch("values"), batch("returns"), clip=clip)
    weights = token_weights(AGGREGATION[options["loss_agg_mode"]], MASK, dtype=torch.float64)
    torch.testing.assert_close(masked_sum(weights * ours.loss, MASK), tensor(expected["vf_loss"]), **CLOSE)
    torch.testing.assert_close(masked_mean(ours.clipped.double(), MASK), tensor(expected["vf_clipfrac"]), **CLOSE)
