"""Folders that every machine must see as the same one."""

from __future__ import annotations

import socket
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
