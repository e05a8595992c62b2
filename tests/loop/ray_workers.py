"""The worker processes of a run on Ray, as the operating system sees them."""

from __future__ import annotations

import psutil


def workers_of(controller: int) -> list[psutil.Process]:
    """Processes that run a rank, among the descendants of the run's own process, oldest first."""
    found = [process for process in psutil.Process(controller).children(recursive=True) if _is_rank(process)]
    return sorted(found, key=lambda process: process.create_time())


def _is_rank(process: psutil.Process) -> bool:
    try:
        name = process.cmdline()[:1]
    except psutil.Error:  # ended meanwhile
        return False
    return bool(name) and name[0].startswith("ray::RankProcess")
