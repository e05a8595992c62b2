"""Folders that every machine must see as the same one."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import ClusterError


def check_shared(folder: Path) -> None:
    """Find out that this machine sees a folder that the controller has made.

    One with a folder of its own under the same name would write its part of the weights there, and the files that the
    others see would have zeros in its place.

    Raises:
        ClusterError: It is not there.
    """
    if not folder.is_dir():
        raise ClusterError(
            f"{socket.gethostname()} does not see {folder}, which the controller has made",
            remedy="set run.folder, and the folder of an export, to a file system that all machines share",
        )


@contextmanager
def marked(folder: Path) -> Generator[Path]:
    """A folder within `folder` that is there for the length of the block: `check_shared` tells who sees it.

    The name of `folder` itself may be that of another one on another machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".shared_", dir=folder) as mark:
        yield Path(mark)
