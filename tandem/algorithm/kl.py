"""Estimators of the KL divergence from the reference to the policy, for each token.

With d = logprobs - ref_logprobs on a token that the policy drew, the true KL(policy || reference) is the mean of d.

    name   estimate            as a number                  as a term of the loss, on policy
    k1     d                   unbiased, high variance      no penalty at all: its gradient is 0 on average
    k2     d^2 / 2             biased, low variance         the gradient of KL(policy || reference): the right one
    k3     exp(-d) - 1 + d     unbiased, never negative     the gradient of KL(reference || policy), noisy for large d

The gradient of a loss term is the estimator's own, taken through `logprobs`. k3 is GRPO's choice and close to k2 while
the policy is near the reference.

Source:
    J. Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html; DeepSeekMath (arXiv:2402.03300),
    4.1.1, equation 4 (k3); on the gradients: arXiv:2510.01555 and arXiv:2505.17508.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from jaxtyping import Float
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

# exp() of a larger log-ratio says nothing more, and in float32 it overflows from 88 on.
LOG_RATIO_BOUND = 20.0
# One token on which policy and reference disagree wildly must not outweigh a whole batch (exp(15) is 3 million).
K3_BOUND = 10.0


def k1(logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The log-ratio itself. Negative where the reference finds the token likelier."""
    return logprobs - ref_logprobs


def k2(logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Half the squared log-ratio. Its gradient, on policy, is that of the true KL(policy || reference)."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp(-d) - 1 + d, clamped to at most 10, as in verl; where the clamp acts the gradient is 0.

    The clamp acts for d < -2.6 (the reference finds the token 13 times likelier, or more) and for d > 11. `kl_clamped`
    in the metrics of a loss says on what share of the tokens.
    """
    negative = (ref_logprobs - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # The true value is never negative: what lies below 0 is rounding, and stays as it is, for its gradient's sake.
    return (negative.exp() - 1.0 - negative).clamp(max=K3_BOUND)


ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def token_kl(
    logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"], estimator: KlEstimator = "k3"
) -> Float[Tensor, "*shape"]:
    """The named estimate of each token's KL(policy || reference), in nats. Gradients flow through `logprobs`.

    Raises:
        ValueError: An unknown name.
    """
    check_estimator(estimator)
    return ESTIMATORS[estimator](logprobs, ref_logprobs)


def check_estimator(estimator: str) -> None:
    """Raise ValueError unless `token_kl` knows this name."""
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}; choose one of {', '.join(ESTIMATORS)}")
