"""GPG: the plain policy gradient, on group-relative advantages. No ratio, no clipping.

    loss of a token = -A * logprobs

    from gpg import gpg

    td.train(config, loss=gpg)                              # or trainer.update(..., loss=gpg)
    td.FunctionLoss(gpg, aggregation="sequence_sum")        # REINFORCE as it is written in textbooks

It is the right gradient for one update per step. Of several, the later ones take the responses for their own.

Source:
    GPG (arXiv:2504.02546), without its factor for batches in which some groups have no contrast. REINFORCE: R. J.
    Williams, Machine Learning 8 (1992).
"""

from __future__ import annotations

from torch import Tensor


def gpg(*, logprobs: Tensor, advantages: Tensor, **_: object) -> Tensor:
    """Token losses [b, L]."""
    return -advantages * logprobs
