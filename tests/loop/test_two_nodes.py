"""A run on a Ray cluster that is there already: two nodes on this machine, a worker on each."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.loop.small_run import differences, run_command, small_config, traces_of, write_config


@pytest.mark.slow
def test_a_run_joins_a_cluster(tmp_path: Path) -> None:
    """It leaves the cluster as it is, and does what a run in a cluster of its own does."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        run = trained(tmp_path / "joined", cluster.address)
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            deadline = time.monotonic() + 30  # nodes tell each other now and then what they have
            while ray.available_resources()["CPU"] < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert ray.available_resources()["CPU"] == 2, "a worker is left"
            assert len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 2
        finally:
            ray.shutdown()
    finally:
        cluster.shutdown()
    assert differences(traces_of(run), traces_of(trained(tmp_path / "own", None))) == []


def trained(folder: Path, address: str | None) -> Path:
    folder.mkdir()
    cluster = {"num_workers": 2, "threads": 1, "device": "cpu", "address": address}
    config = small_config(folder, {"cluster": cluster, "run": {"steps": 2, "folder": str(folder / "run")}})
    log = folder / "log"
    assert run_command(["train", str(write_config(folder / "run.yaml", config))], log) == 0, log.read_text()
    return folder / "run"
