"""A run's folder: it belongs to one config, and to one process at a time.

config.yaml                 the resolved config
metrics.jsonl               one line a step
rollouts/step_000012.jsonl  one line a response
changes.jsonl               what differed each time the run went on with another config
checkpoints/
.lock                       held by the process that trains
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from tandem.config import Config, Difference, difference, load_config, to_yaml
from tandem.errors import CheckpointError, ConfigError, Problem
from tandem.observe.journal import Journal, cannot_write

HEADER = (
    "# The config of this run, with every option resolved. Written by Tandem: to change it, change your own file.\n"
)


class RunFolder:
    """Takes a folder for a run, and gives it back on `close`.

    A run that is there already stays as it is until `keep_config`: something may yet speak against going on.

    Raises:
        ConfigError: `run.folder` is not set.
        CheckpointError: The folder cannot be written, another process trains in it, or it holds a run of another
            config.
    """

    def __init__(self, config: Config) -> None:
        if config.run.folder is None:
            raise ConfigError([Problem("run.folder", "is not set", "set it to the folder that should keep the run")])
        self._config = config
        self.path = Path(config.run.folder)
        self.config_file = self.path / "config.yaml"
        self.rollouts = self.path / "rollouts"
        self.metrics = Journal(self.path / "metrics.jsonl")
        self._lock: IO[str] | None = None
        try:
            self.rollouts.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path)
            self.changed = self._claim(config)
        except OSError as error:
            self.close()
            raise cannot_write(self.path, error) from error
        except CheckpointError:
            self.close()
            raise

    def keep_config(self) -> None:
        """Write what has changed since the run began, and the config with it.

        Raises:
            CheckpointError: It cannot be written.
        """
        if self.changed:
            when = datetime.now(UTC).isoformat(timespec="seconds")
            changes = [str(change) for change in (*self.changed.guarded, *self.changed.free)]
            Journal(self.path / "changes.jsonl").append({"time": when, "changes": changes})
            write_atomically(self.config_file, HEADER + to_yaml(self._config))

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def has_progress(self) -> bool:
        """Whether there is anything in it that a run has reached."""
        checkpoints = self.path / "checkpoints"
        metrics = self.metrics.path
        return (metrics.exists() and metrics.stat().st_size > 0) or (
            checkpoints.is_dir() and any(checkpoints.iterdir())
        )

    def _claim(self, config: Config) -> Difference | None:
        """Raise where the folder holds something that this config may not go on with; return what differs."""
        changed = self._changed(config)
        if changed is not None and changed.fixed:
            lines = "\n".join(f"  {change}" for change in changed.fixed)
            raise CheckpointError(
                f"{self.path} holds a run that can only go on as it began, in this:\n{lines}",
                remedy="set it as it was, or take another run.folder",
            )
        if changed is not None and changed.guarded and not config.run.allow_changes:
            lines = "\n".join(f"  {change}" for change in changed.guarded)
            raise CheckpointError(
                f"{self.path} holds a run of another config:\n{lines}",
                remedy="take another run.folder, set these keys as they were, or set run.allow_changes=true to go on",
            )
        if changed is None:
            write_atomically(self.config_file, HEADER + to_yaml(config))
        return changed

    def _changed(self, config: Config) -> Difference | None:
        """What differs from the config of the run that is there; None where there is none."""
        if not self.config_file.exists():
            if self.has_progress:
                raise CheckpointError(
                    f"{self.path} holds metrics or checkpoints, but no config.yaml that says of which run",
                    remedy="take another run.folder, or put its config.yaml back",
                )
            return None
        if not self.config_file.read_text(errors="replace").startswith(HEADER):
            raise CheckpointError(
                f"{self.config_file} was not written by a run, and would be overwritten",
                remedy="take another run.folder",
            )
        if not self.has_progress:
            return None  # a run that failed before its first step leaves nothing to protect
        try:
            old = load_config(self.config_file, need_data=False, need_reward=False)
        except ConfigError as error:
            raise CheckpointError(
                f"the run in {self.path} cannot be resumed, its config.yaml is not valid:\n{error}",
                remedy="take another run.folder, or put the file back as the run wrote it",
            ) from error
        return difference(old, config)


def lock(folder: Path) -> IO[str]:
    """Hold the folder for this process until the returned file is closed, or the process ends in any way.

    Raises:
        CheckpointError: Another process holds it.
    """
    file = (folder / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise CheckpointError(
            f"another process ({holder or 'of unknown number'}) is training in {folder}",
            remedy="wait for it, stop it, or take another run.folder",
        ) from error
    file.truncate(0)
    try:
        file.write(f"process {os.getpid()}")
        file.flush()
    except OSError:
        with contextlib.suppress(OSError):  # closing tries to write it once more
            file.close()
        raise
    return file


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that there is the old one or the new one at any moment.

    Raises:
        CheckpointError: It cannot be written; an old one is untouched.
    """
    beside = path.with_name(f"{path.name}.new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            beside.unlink()
        raise cannot_write(path, error) from error
