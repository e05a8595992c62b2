"""A program that has no clause for the death of its workers: see test_ray_failures.py."""

from __future__ import annotations

import sys

from tandem.runtime.cluster import check_cluster
from tests.unit.runtime.worker import SETTINGS, Worker


def main(address: str) -> None:
    """End with an error."""
    check_cluster(2, "cpu", address)  # first, as programs do: it finds out whether there is Ray at all
    from tandem.runtime.ray import RayGroup

    group = RayGroup(Worker, SETTINGS, num_workers=2, device_type="cpu", address=address)
    try:
        group.call(Worker.die, "kill")
    finally:
        group.close()


if __name__ == "__main__":
    main(sys.argv[1])
