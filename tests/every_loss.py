"""Every loss there is, those of examples/losses/ included, for tests that hold for all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from examples.losses.dppo import binary_kl, dppo
from examples.losses.gmpo import gmpo
from examples.losses.gpg import gpg
from examples.losses.kl_cov import kl_cov
from examples.losses.sapo import sapo
from tandem.algorithm.function_loss import FunctionLoss
from tandem.algorithm.losses import ClippedSurrogate
from tandem.algorithm.masked import Aggregation
from tandem.algorithm.protocols import Loss, LossFunction

# Ranges in which some tokens of a test's batch are, and some are not.
SURROGATES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 1.3},
    "gspo": {"clip_low": 0.05, "clip_high": 0.08, "surrogate": "gspo"},
    "cispo": {"clip_low": 0.3, "clip_high": 0.2, "surrogate": "cispo"},
}
FUNCTIONS: dict[str, LossFunction] = {
    "gpg": gpg,
    "gmpo": partial(gmpo, clip=0.2),
    "sapo": sapo,
    "dppo_tv": partial(dppo, low=0.05, high=0.05, max_weight=1.3),
    "dppo_kl": partial(dppo, divergence=binary_kl, low=0.02, high=0.02, max_weight=1.3),
}
LOSSES = (*SURROGATES, *FUNCTIONS, "kl_cov")


def make_loss(
    name: str,
    aggregation: Aggregation = "token_mean",
    *,
    advantages: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    **terms: Any,
) -> Loss:
    """The loss of that name for this whole mini-batch. `terms` of KL and entropy are for the surrogates."""
    if name in SURROGATES:
        return ClippedSurrogate(aggregation=aggregation, constant_length=20, **SURROGATES[name], **terms)
    if name in FUNCTIONS:
        function = FUNCTIONS[name]
    else:
        function = kl_cov(advantages, old_logprobs, response_mask, share=0.3, coef=0.5)
    return FunctionLoss(function, aggregation, constant_length=20)
