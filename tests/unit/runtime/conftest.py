"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[str]:
    """Address of a cluster of two nodes with one CPU slot each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
        try:
            cluster.add_node(num_cpus=1, num_gpus=0)
            cluster.wait_for_nodes()
            yield cluster.address
        finally:
            cluster.shutdown()
