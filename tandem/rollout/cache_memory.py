"""How much memory the KV cache may take where the config does not say."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_SHARE = 4  # a quarter of the device: weights, optimizer state and gradients are there, too
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def auto_cache_bytes(device: torch.device) -> int:
    """A quarter of the device's memory; on a CPU, of what the machine has and the container may use.

    It does not depend on what is free at the moment, so that runs on one machine have one schedule.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // _SHARE
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return container_bytes(total, _CONTAINER_LIMITS) // _SHARE


def container_bytes(total: int, limits: tuple[Path, ...]) -> int:
    """`total`, or the least limit that one of the files sets."""
    texts = [path.read_text().strip() for path in limits if path.is_file()]
    return min([total, *(int(text) for text in texts if text.isdigit())])  # else "max"
