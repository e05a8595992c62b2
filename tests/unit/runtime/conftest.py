"""A Ray cluster of two nodes on this machine; processes that must come to their end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster

from tests.unit.runtime.worker import becomes_readable


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[str]:
    """Address of a cluster of two nodes with one CPU slot each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
        try:
            cluster.add_node(num_cpus=1, num_gpus=0)
            cluster.wait_for_nodes()
            yield cluster.address
        finally:
            cluster.shutdown()


@pytest.fixture(scope="session")
def must_end() -> Iterator[dict[int, float]]:
    """Descriptors of processes, and when each must have ended at the latest. Looked at when all tests are done."""
    deadlines: dict[int, float] = {}
    yield deadlines
    late = [fd for fd, deadline in deadlines.items() if not becomes_readable(fd, deadline - time.monotonic())]
    for descriptor in deadlines:
        os.close(descriptor)
    assert not late
