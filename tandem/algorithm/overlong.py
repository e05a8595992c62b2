"""The price of a long response, which grows before the response is cut off."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def overlong_penalty(
    lengths: Int[Tensor, " B"], *, max_length: int, buffer: int, penalty: float = 1.0
) -> Float[Tensor, " B"]:
    """What each response loses for its length: to be subtracted from its reward.

        0                                             up to max_length - buffer tokens
        penalty * (length - (max_length - buffer)) / buffer    above that, so all of `penalty` at max_length

    Args:
        lengths: Tokens of each response.
        max_length: The limit at which responses are cut off.
        buffer: The last so many tokens before it are those that cost. 0 = none do.
        penalty: In the reward's own unit.

    Returns:
        float32, at least 0.

    Source:
        DAPO (arXiv:2503.14476), 3.4, equation 13, there with the sign of a reward and penalty 1.
    """
    over = (lengths - (max_length - buffer)).clamp(min=0, max=buffer)
    return over.float() * (penalty / max(buffer, 1))
