"""How much memory the KV cache may take where the config does not say."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tandem.model.ranks import ALONE, Ranks

_SHARE = 4  # a quarter of the device: weights, optimizer state and gradients are there, too
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def auto_cache_bytes(device: torch.device, ranks: Ranks = ALONE) -> int:
    """A quarter of the device's memory; on CPUs, of what the machine has, the container may use and the ranks share.

    It does not depend on what is free at the moment, so that runs on one machine have one schedule. Of several ranks
    all get what the least of them has, so that all decode as many responses at once. Call it on all ranks.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        total = container_bytes(machine, _CONTAINER_LIMITS) // ranks.local_size
    return min(ranks.gather(total // _SHARE))


def container_bytes(total: int, limits: tuple[Path, ...]) -> int:
    """`total`, or the least limit that one of the files sets."""
    texts = [path.read_text().strip() for path in limits if path.is_file()]
    return min([total, *(int(text) for text in texts if text.isdigit())])  # else "max"
