"""Section `cluster`: the devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.section import Auto, Count, Section


class ClusterConfig(Section):
    """The devices."""

    device: Auto | Literal["cpu", "cuda"] = Field("auto", description="Where to compute. auto = cuda if there is one.")
    deterministic: bool | Auto = Field(
        "auto", description="Only algorithms that repeat to the bit; slower on a GPU. auto = true on a CPU."
    )
    threads: Count | Auto = Field(
        "auto",
        description=(
            "CPU threads of the worker, whatever OMP_NUM_THREADS says; another number can change last bits. "
            "auto = all CPUs."
        ),
    )
