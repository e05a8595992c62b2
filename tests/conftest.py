"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import jaxtyping
import pytest
import torch

import tests.shapes  # noqa: F401 - the hook looks for it among the modules that are loaded
from tests.ranks import RankProcesses

os.environ["HF_HUB_OFFLINE"] = "1"  # a test that would ask a hub fails at once
os.environ["HF_DATASETS_OFFLINE"] = "1"
torch.set_num_threads(1)

# Shapes in signatures are checked in the tests' own process. Not in `hybrid.train_phase`: it tells users what is wrong.
_ROOMS = ("algorithm", "batch", "hybrid.worker", "model", "rollout", "trainer")
jaxtyping.install_import_hook([f"tandem.{room}" for room in _ROOMS], "tests.shapes.check")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the GPU's tests where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """Processes that can be ranks of a process group; see tests/ranks.py."""
    processes = RankProcesses()
    yield processes
    processes.close()
