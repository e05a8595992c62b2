"""Sampling noise as a pure function: one uniform number for each (seed, step, prompt, response, position).

A random number generator hands out numbers in the order of the calls, so what a response gets would depend on the
other responses in the batch. A hash of the coordinates has no order: the noise of a token is the same on any rank,
in any batch, on CPU, CUDA or numpy, to the bit.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

_MASK = 0xFFFFFFFF
_LANES = (0x243F6A88, 0x13198A2E)  # two independent 32-bit hashes; fraction digits of pi as their starting values


def uniform_noise(
    seed: int,
    step: int,
    prompt_ids: Int64[Tensor, "*#b"],
    indices: Int64[Tensor, "*#b"],
    positions: Int64[Tensor, "*#b"],
) -> Float64[Tensor, "*b"]:
    """Uniform numbers in [0, 1), multiples of 2**-53, one for each broadcast element.

    Args:
        seed: Of the run.
        step: Of training.
        prompt_ids: Which prompt.
        indices: Which response within its group.
        positions: Which token of the response.

    Source:
        The mixing function is a 32-bit xor-shift-multiply of Chris Wellons' "Prospecting for Hash Functions" (2018).
    """
    device = positions.device
    scalars = [torch.tensor(value, dtype=torch.int64, device=device) for value in (seed, step)]
    lanes = []
    for start in _LANES:
        state = torch.tensor(start, dtype=torch.int64, device=device)
        for value in (*scalars, prompt_ids, indices, positions):
            state = _mix(state ^ (value & _MASK))
            state = _mix(state ^ ((value >> 32) & _MASK))
        lanes.append(state)
    high, low = lanes
    return ((high >> 5) * (1 << 26) + (low >> 6)).to(torch.float64) * 2.0**-53


def _mix(x: Int64[Tensor, "*b"]) -> Int64[Tensor, "*b"]:
    """A bijection of 32-bit numbers. Products wrap around in int64, which leaves their low 32 bits right."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0xD35A2D97) & _MASK
    return x ^ (x >> 15)
