"""The sampling noise: a pure function of its coordinates, the same in numpy and torch."""

from __future__ import annotations

import numpy as np
import torch

from tandem.rollout.noise import uniform_noise

BITS = np.uint64(0xFFFFFFFF)


def numpy_mix(x: np.ndarray) -> np.ndarray:
    """Written for itself, in unsigned arithmetic."""
    x = x ^ (x >> np.uint64(16))
    x = (x * np.uint64(0x21F0AAAD)) & BITS
    x = x ^ (x >> np.uint64(15))
    x = (x * np.uint64(0xD35A2D97)) & BITS
    return x ^ (x >> np.uint64(15))


def numpy_noise(seed: int, step: int, prompt: int, index: int, positions: np.ndarray) -> np.ndarray:
    lanes = []
    for start in (0x243F6A88, 0x13198A2E):
        state = np.full(positions.shape, start, dtype=np.uint64)
        for value in (seed, step, prompt, index, positions.astype(np.uint64)):
            words = np.asarray(value, dtype=np.uint64)
            state = numpy_mix(state ^ (words & BITS))
            state = numpy_mix(state ^ (words >> np.uint64(32)))
        lanes.append(state)
    whole = (lanes[0] >> np.uint64(5)) * np.uint64(1 << 26) + (lanes[1] >> np.uint64(6))
    return whole.astype(np.float64) / 2.0**53


def noise(seed: int, step: int, prompt: int, index: int, positions: int) -> torch.Tensor:
    return uniform_noise(seed, step, torch.tensor(prompt), torch.tensor(index), torch.arange(positions))


def test_noise_equals_numpy_to_the_bit() -> None:
    for coordinates in ((0, 0, 0, 0), (1, 2, 3, 4), (2**31 + 5, 10**6, 2**40 + 7, 63), (2**62, 1, 2**33, 2**35)):
        expected = numpy_noise(*coordinates, np.arange(300))
        assert noise(*coordinates, 300).numpy().tobytes() == expected.tobytes()


def test_every_coordinate_changes_the_noise() -> None:
    base = (7, 11, 13, 3)
    seen = {float(noise(*base, 1))}
    for place in range(4):
        for bit in (0, 20, 32, 45):
            moved = list(base)
            moved[place] ^= 1 << bit
            seen.add(float(noise(*moved, 1)))
    assert len(seen) == 1 + 4 * 4


def test_noise_of_a_token_does_not_depend_on_what_is_asked_for_with_it() -> None:
    prompts, indices = torch.arange(6)[:, None], torch.arange(6)[:, None] % 2
    block = uniform_noise(5, 9, prompts, indices, torch.arange(40))
    assert block.shape == (6, 40)
    assert torch.equal(block[4, 17:30], noise(5, 9, 4, 0, 40)[17:30])


def test_noise_is_uniform() -> None:
    values = uniform_noise(0, 0, torch.arange(100)[:, None], torch.tensor(0), torch.arange(1000)).flatten()
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = torch.histc(values, bins=100, min=0.0, max=1.0)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert 60 < chi_square < 145  # 99 degrees of freedom: 0.1 % are outside on either side
    neighbours = values.reshape(100, 1000)
    correlation = torch.corrcoef(torch.stack([neighbours[:, :-1].flatten(), neighbours[:, 1:].flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.01
