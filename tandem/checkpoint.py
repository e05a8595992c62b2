"""Checkpoints: everything that a run needs to go on, written beside the old ones and renamed when complete.

    RUN/checkpoints/step_000020/
        state.json      step, counters, position in the data, best evaluation
        model/          the policy as a Hugging Face folder, float32: transformers loads it as it is
        optimizer/      AdamW's moments, float32 (torch.distributed.checkpoint in safetensors files)

A folder under this name is complete: it is written as `step_000020.partial`, flushed to the disk, and renamed. Nothing
in it is a pickle. Random numbers need no saving: all of Tandem's are functions of seed and position.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from tandem.errors import CheckpointError

FORMAT = 1
SaveModel = Callable[[Mapping[str, Tensor], Path], None]
_NAME = re.compile(r"step_(\d{6,})$")


@dataclass(frozen=True)
class Snapshot:
    """One moment of a run, copied: training may go on while it is written."""

    step: int
    weights: Mapping[str, Tensor]  # by the model's own names
    moments: Mapping[str, Tensor]
    state: Mapping[str, Any]  # JSON
    score: float | None  # of the evaluation at this step; larger is better


def complete_checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folder = run_folder / "checkpoints"
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.search(path.name))]
    return [path for _, path in sorted(found)]


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that `path` means: itself, or the newest of a run folder. None where it is neither."""
    if (path / "state.json").is_file() and (path / "optimizer").is_dir():
        return path
    checkpoints = complete_checkpoints(path)
    return checkpoints[-1] if checkpoints else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        CheckpointError: Unreadable, or of another format.
    """
    try:
        state = json.loads((checkpoint / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {checkpoint / 'state.json'}: {error}",
            remedy="delete this checkpoint folder to use an older one",
        ) from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{checkpoint} has format {state.get('format')!r}, this version reads {FORMAT}")
    return state


def read_moments(checkpoint: Path, into: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `into`, in place, with those of the same names.

    Raises:
        CheckpointError: A file is damaged, a tensor missing or of another shape.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load(dict(into), storage_reader=HuggingFaceStorageReader(str(checkpoint / "optimizer")), no_dist=True)
    except (CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"{checkpoint} cannot be loaded: {error}",
            remedy="it belongs to another model, or is damaged: delete this checkpoint folder to use an older one",
        ) from error


class CheckpointWriter:
    """Writes the checkpoints of one run, in a thread of its own, and deletes the old ones that are no longer wanted.

    Args:
        run_folder: The run.
        keep: How many of the newest stay.
        keep_best: How many of the best evaluated stay, beside those.
        background: Write while training goes on. False = `write` returns when the checkpoint is complete.
    """

    def __init__(self, run_folder: Path, *, keep: int, keep_best: int, background: bool) -> None:
        self.folder = run_folder / "checkpoints"
        self.run_folder = run_folder
        self.keep = keep
        self.keep_best = keep_best
        self.background = background
        # Not daemons: a program that ends by itself waits for its last checkpoint.
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-checkpoint")
        self._pending: Future[None] | None = None

    def write(self, snapshot: Snapshot, save_model: SaveModel) -> None:
        """Write one checkpoint, after the one before is complete.

        Args:
            snapshot: What to write.
            save_model: Writes weights, config and tokenizer into a folder that transformers loads.

        Raises:
            CheckpointError: This write failed (the disk is full, the folder cannot be written), or the one before.
        """
        self.wait()
        self._pending = self._threads.submit(self._write, snapshot, save_model)
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            CheckpointError: The last write failed.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (OSError, CheckpointException) as error:
            raise CheckpointError(
                f"a checkpoint could not be written to {self.folder}: {error}",
                remedy="free disk space or set run.folder to another disk; earlier checkpoints are intact, "
                "and the same command goes on from them",
            ) from error

    def _write(self, snapshot: Snapshot, save_model: SaveModel) -> None:
        final = self.folder / f"step_{snapshot.step:06d}"
        partial = final.with_name(final.name + ".partial")
        try:
            self._write_into(partial, snapshot, save_model)
            if final.exists():  # the same step again
                _remove(final)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # a failed one must not fill the disk
        _flush(self.folder)
        self._delete_old()

    def _write_into(self, folder: Path, snapshot: Snapshot, save_model: SaveModel) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_model(snapshot.weights, folder / "model")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            writer = HuggingFaceStorageWriter(str(folder / "optimizer"), save_distributed=True)
            dcp.save(dict(snapshot.moments), storage_writer=writer, no_dist=True)
        state = {"format": FORMAT, "step": snapshot.step, "score": snapshot.score, **snapshot.state}
        (folder / "state.json").write_text(json.dumps(state, indent=1))
        _flush_tree(folder)

    def _delete_old(self) -> None:
        checkpoints = complete_checkpoints(self.run_folder)
        scores = [read_state(path)["score"] for path in checkpoints]
        scored = [number for number, score in enumerate(scores) if score is not None]
        best = sorted(scored, key=lambda number: -scores[number])[: self.keep_best]  # the earlier of equals
        wanted = {*best, *range(len(checkpoints))[-self.keep :]}
        for number, path in enumerate(checkpoints):
            if number not in wanted:
                _remove(path)

    def clean(self) -> None:
        """Remove what a killed process left half written or half deleted."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.endswith((".partial", ".deleted")):
                    shutil.rmtree(path, ignore_errors=True)

    def discard_after(self, step: int) -> None:
        """Remove checkpoints later than `step`, which the run that goes on from it writes anew, and old ones that a
        killed process had no time to remove."""
        for path in complete_checkpoints(self.run_folder):
            if int(path.name.rsplit("_", 1)[1]) > step:
                _remove(path)
        self._delete_old()


def _remove(checkpoint: Path) -> None:
    """Renamed first: a checkpoint that is half deleted must not look complete."""
    doomed = checkpoint.with_name(checkpoint.name + ".deleted")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Host copies that stay as they are while training goes on."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _flush_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _flush(Path(root) / name)
        _flush(Path(root))


def _flush(path: Path) -> None:
    """Force to the disk: after a power cut, too, a renamed folder must be whole."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def optimizer_tensors(names: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by name; moments that do not exist yet are zeros, as AdamW would make them."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in names.items():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            tensors[f"{key}.{name}"] = state[key]
    return tensors
