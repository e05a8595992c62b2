from __future__ import annotations

import threading
from pathlib import Path

from tandem.checkpoint import CheckpointWriter, complete_checkpoints


def test_in_the_background_the_run_goes_on_meanwhile(tmp_path: Path) -> None:
    """The write waits for something that comes after `write` has returned: in the foreground that could not be."""
    returned = threading.Event()
    found: list[bool] = []

    def save(folder: Path) -> None:
        found.append(returned.wait(timeout=20 if background else 0))

    for background in (True, False):
        returned.clear()
        writer = CheckpointWriter(
            tmp_path / str(background), keep=1, keep_best=0, metric="pass@1", background=background
        )
        writer.write(1, {}, {}, save)
        is_complete = bool(complete_checkpoints(tmp_path / str(background)))
        returned.set()
        writer.wait()
        assert is_complete == (not background)
        assert complete_checkpoints(tmp_path / str(background))
    assert found == [True, False]
