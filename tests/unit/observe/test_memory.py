from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tandem.observe import memory
from tandem.observe.memory import PeakMemory, bytes_in_use, return_freed_memory

CPU = torch.device("cpu")
MIB = 2**20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc and glibc")


@on_linux
def test_the_peak_is_that_of_its_own_time() -> None:
    """To 2 MiB: the kernel counts pages in batches. In a process of its own: others' threads would count."""
    program = """
    import torch
    from tandem.observe.memory import PeakMemory, bytes_in_use
    cpu = torch.device("cpu")
    peak = PeakMemory(cpu)
    for size in (64, 0, 32):
        before = bytes_in_use(cpu)
        peak.start()
        block = torch.ones(size * 2**18)
        del block
        print(peak.stop() - before, bytes_in_use(cpu) - before)
    """
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed leaves at once
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    found = [[int(number) / MIB for number in line.split()] for line in done.stdout.splitlines()]
    assert [peak for peak, _ in found] == pytest.approx([64, 0, 32], abs=2)
    assert [left for _, left in found] == pytest.approx([0, 0, 0], abs=2), "a peak is not what is still in use"


def test_where_a_peak_cannot_be_reset_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    peak = PeakMemory(CPU)
    peak.start()
    assert peak.stop() is None, "the peak of the whole process would be no measure of a phase"


def test_a_peak_that_was_not_started_is_none() -> None:
    assert PeakMemory(CPU).stop() is None


@on_linux
def test_freed_memory_goes_back_to_the_system() -> None:
    blocks = [bytearray(64 * 1024) for _ in range(1024)]  # 64 MiB in pieces too small for glibc to map one by one
    kept = blocks[::8]
    before = bytes_in_use(CPU)
    blocks.clear()
    return_freed_memory()
    after = bytes_in_use(CPU)
    assert before is not None
    assert after is not None
    assert before - after > 40 * MIB, "7 of 8 blocks are free"
    assert len(kept) == 128
