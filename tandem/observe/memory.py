"""The memory that this process uses: now, and at its highest.

On a GPU it is what PyTorch has allocated there, on a CPU what is resident: all of the process, its libraries included.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): resets the peak resident set size, "VmHWM", to the present one


class PeakMemory:
    """The highest use of memory between `start` and `stop`.

    The peak belongs to the process: there is one measurement at a time, and what `getrusage` calls `ru_maxrss` begins
    anew with it, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_measured = False

    def start(self) -> None:
        """Forget the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._is_measured = True
            return
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:  # not Linux, or not allowed: what there is then, `ru_maxrss`, can never fall
            self._is_measured = False
        else:
            self._is_measured = True

    def stop(self) -> int | None:
        """The peak since `start`, in bytes; None where the system does not tell it."""
        if not self._is_measured:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status("VmHWM")


def bytes_in_use(device: torch.device) -> int | None:
    """The memory in use at present; None where the system does not tell it."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")


def return_freed_memory() -> None:
    """Give memory that was freed on the CPU back to the system at once. glibc keeps much of it for later."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # another C library
        return
    trim(0)


def _status(field: str) -> int | None:
    try:
        text = _STATUS.read_text()
    except OSError:
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
