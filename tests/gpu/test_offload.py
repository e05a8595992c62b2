"""Offload from a GPU, to host memory and to disk, and the GPU's peak as a metric."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from tandem.observe.memory import PeakMemory, bytes_in_use
from tandem.trainer.offload import Offload

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_the_gpu_is_free_meanwhile_and_content_comes_back(kind: Literal["host", "disk"], tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    tensors = [torch.randn(12 * MIB, device=device), torch.randn(77, device=device).bfloat16(), torch.tensor(3.0)]
    before = [tensor.cpu() for tensor in tensors]
    used = bytes_in_use(device)
    assert used is not None
    offload = Offload(kind, tmp_path)
    for _ in range(3):
        offload.away(tensors)
        assert bytes_in_use(device) == used - 48 * MIB - 512, "PyTorch allocates in units of 512 bytes"
        others = torch.full((12 * MIB,), 7.0, device=device)  # likely in the memory that was freed
        offload.back()
        del others
        assert all(torch.equal(now.cpu(), then) for now, then in zip(tensors, before, strict=True))
    offload.close()


def test_the_peak_of_a_gpu_is_that_of_its_own_time() -> None:
    device = torch.device("cuda", 0)
    peak = PeakMemory(device)
    for mib in (64, 16):
        before = bytes_in_use(device)
        peak.start()
        block = torch.empty(mib * MIB, dtype=torch.uint8, device=device)
        del block
        assert before is not None
        assert peak.stop() == before + mib * MIB
