"""A program whose first workers die early: see test_ray_failures.py."""

from __future__ import annotations

import sys

from tandem.errors import WorkerError
from tandem.runtime.cluster import check_cluster
from tests.unit.runtime.worker import SETTINGS, Worker


def main() -> None:
    """Say why the first ones have died, and what the second ones do."""
    check_cluster(2, "cpu", None)  # first, as programs do: it finds out whether there is Ray at all
    from tandem.runtime.ray import RayGroup

    try:
        RayGroup(Worker, SETTINGS, num_workers=2, device_type="cpu")
    except WorkerError as error:
        sys.stdout.write(f"{error.message}\n")
    group = RayGroup(Worker, SETTINGS, num_workers=2, device_type="cpu")
    sys.stdout.write(f"{group.call(Worker.collectives)[1]}\n")
    group.close()


if __name__ == "__main__":
    main()
