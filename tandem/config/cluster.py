"""Section `cluster`: the workers and their devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.section import Auto, Count, CountOrZero, Section, Text


class ClusterConfig(Section):
    """The workers and their devices."""

    num_workers: Count = Field(
        1,
        description=(
            "Worker processes, each with a device of its own, that sample and train together, on Ray. "
            "1 = this process does it, without Ray."
        ),
    )
    address: Text | None = Field(
        None,
        description=(
            "Ray cluster to join, such as 10.0.0.1:6379, or auto for one that runs on this machine. "
            "null = start one here, and end it with the run."
        ),
    )
    max_failures: CountOrZero = Field(
        3,
        description=(
            "When a worker dies, all are started anew and go on from the last checkpoint, so many times at most; a new "
            "checkpoint starts the count again. 0 = stop at once."
        ),
    )
    device: Auto | Literal["cpu", "cuda"] = Field(
        "auto",
        description=(
            "Where to compute. auto = cuda if this machine has a GPU; if it has none, choose yourself where "
            "cluster.address is given."
        ),
    )
    deterministic: bool | Auto = Field(
        "auto", description="Only algorithms that repeat to the bit; slower on a GPU. auto = true on a CPU."
    )
    threads: Count | Auto = Field(
        "auto",
        description=(
            "CPU threads of each worker, whatever OMP_NUM_THREADS says; another number can change last bits. "
            "auto = this machine's CPUs, divided among the workers on it."
        ),
    )
