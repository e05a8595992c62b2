"""Checkpoints: everything that a run needs to go on, written beside the old ones and renamed when complete.

    RUN/checkpoints/step_000020/
        state.json      step, counters, position in the data, evaluations
        model/          the policy as a Hugging Face folder, float32: transformers loads it as it is
        optimizer/      AdamW's moments, float32, in safetensors files: exp_avg.NAME, exp_avg_sq.NAME, step.NAME
        critic/         where there is one: its `model` and `optimizer`

A folder under this name is complete: it is written as `step_000020.partial`, flushed to the disk, and renamed. Nothing
in it is a pickle. What some number of ranks wrote any other number reads, each rank its own shards. Random numbers need
no saving: all of Tandem's are functions of seed and position.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem.errors import CheckpointError
from tandem.model.shards import Shard
from tandem.model.source import complete_checkpoints
from tandem.model.tensor_files import read, write

FORMAT = 2
_LEFTOVER = re.compile(r"step_\d{6,}\.(partial|deleted)")


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
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{checkpoint} has format {found!r}, this version reads {FORMAT}")
    return state


def write_moments(folder: Path, moments: Mapping[str, Shard], *, lead: bool = True) -> None:
    """Write this rank's part of the moments into a checkpoint; its weights are written by `save_model`.

    Raises:
        OSError: They cannot be written.
    """
    write(folder / "optimizer", moments, lead=lead)


def read_moments(folder: Path, into: Mapping[str, Shard], *, checkpoint: Path | None = None) -> None:
    """Fill the shards of `into`, in place, from the tensors of the same names.

    Args:
        folder: The checkpoint, or that of another model within it.
        into: By name.
        checkpoint: Where `folder` lies. None = it is the checkpoint.

    Raises:
        CheckpointError: A file is damaged, a tensor missing or of another shape.
    """
    try:
        read(folder / "optimizer", into)
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{checkpoint or folder} cannot be loaded: {error}",
            remedy="it belongs to another model, or is damaged: delete this checkpoint folder to use an older one",
        ) from error


class CheckpointWriter:
    """Writes the checkpoints of one run, in a thread of its own, and deletes the old ones that are no longer wanted.

    Args:
        run_folder: The run.
        keep: How many of the newest stay.
        keep_best: How many of the best evaluated stay, beside those.
        metric: Of an evaluation, by which it is the best.
        background: Write while training goes on. False = `write` returns when the checkpoint is complete.
    """

    def __init__(self, run_folder: Path, *, keep: int, keep_best: int, metric: str, background: bool) -> None:
        self.folder = run_folder / "checkpoints"
        self.run_folder = run_folder
        self.keep = keep
        self.keep_best = keep_best
        self.metric = metric
        self.background = background
        # Not daemons: a program that ends by itself waits for its last checkpoint.
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-checkpoint")
        self._pending: Future[None] | None = None

    def write(
        self, step: int, state: Mapping[str, Any], evaluation: Mapping[str, float], save: Callable[[Path], None]
    ) -> None:
        """Write one checkpoint, after the one before is complete.

        Args:
            step: The last one that it contains.
            state: What else the run needs to go on, as JSON.
            evaluation: The metrics of this step's, if it had one.
            save: Given the checkpoint's folder, writes `model` and `optimizer` into it, and returns when all ranks
                have. It is called in this writer's thread: what it writes must stay as it is while training goes on.

        Raises:
            CheckpointError: This write failed (the disk is full, the folder cannot be written), or the one before.
        """
        self.wait()
        self._pending = self._threads.submit(self._write, step, state, evaluation, save)
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
        except OSError as error:
            raise CheckpointError(
                f"a checkpoint could not be written to {self.folder}: {error}",
                remedy="free disk space or set run.folder to another disk; earlier checkpoints are intact, "
                "and the same command goes on from them",
            ) from error

    def _write(
        self, step: int, state: Mapping[str, Any], evaluation: Mapping[str, float], save: Callable[[Path], None]
    ) -> None:
        with complete_or_absent(self.folder / f"step_{step:06d}") as folder:
            save(folder)
            finite = {name: value for name, value in evaluation.items() if math.isfinite(value)}
            fields = {"format": FORMAT, "step": step, "evaluation": finite, **state}
            (folder / "state.json").write_text(json.dumps(fields, indent=1))
        self.delete_old()

    def delete_old(self) -> None:
        """Delete the checkpoints that are neither among the newest nor among the best. A damaged one is left alone."""
        scores: dict[Path, float | None] = {}
        for path in complete_checkpoints(self.run_folder):
            with suppress(CheckpointError):
                scores[path] = read_state(path)["evaluation"].get(self.metric)
        scored = {path: score for path, score in scores.items() if score is not None}
        best = sorted(scored, key=lambda path: -scored[path])[: self.keep_best]  # the earlier of equals
        for path in scores.keys() - {*best, *list(scores)[-self.keep :]}:
            _remove(path)

    def clean(self) -> None:
        """Remove what a killed process left half written or half deleted."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if _LEFTOVER.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def complete_or_absent(folder: Path) -> Generator[Path]:
    """A folder to write into, which takes the name and the place of `folder` when the block has ended well.

    Until then it is called `folder.partial`. It is flushed to the disk before it is renamed: after a power cut, too,
    a folder of this name is whole.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process
    partial.mkdir(parents=True)
    try:
        yield partial
        _flush_tree(partial)
        if folder.exists():
            _remove(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # a failed one must not fill the disk
    _flush(folder.parent)


@contextmanager
def complete_or_as_it_was(folder: Path) -> Generator[Path]:
    """Likewise; but a folder that is there stays, and gets the new files in place of old ones when all are written."""
    if not folder.exists():
        with complete_or_absent(folder) as partial:
            yield partial
        return
    with complete_or_absent(folder.with_name(folder.name + ".new")) as partial:
        yield partial
    written = folder.with_name(folder.name + ".new")
    for old in folder.glob("*.safetensors*"):  # of a model in more files
        if not (written / old.name).exists():
            old.unlink()
    for file in written.iterdir():
        file.replace(folder / file.name)
    written.rmdir()


def _remove(folder: Path) -> None:
    """Renamed first: what is half deleted must not look complete."""
    doomed = folder.with_name(folder.name + ".deleted")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


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


def host_shards(shards: Mapping[str, Shard], *, copy: bool) -> dict[str, Shard]:
    """The same in host memory; with `copy` they stay as they are while training goes on."""
    return {name: replace(each, tensor=each.tensor.detach().to("cpu", copy=copy)) for name, each in shards.items()}


def optimizer_shards(
    weights: Mapping[str, Shard], optimizer: torch.optim.Optimizer, *, lead: bool = True
) -> dict[str, Shard]:
    """AdamW's state by name, cut like the weights; moments that do not exist yet are zeros, as AdamW would make them.

    Args:
        weights: This rank's, whose tensors are the parameters that the optimizer updates.
        optimizer: AdamW.
        lead: This rank writes the numbers of updates, which every rank has.
    """
    shards: dict[str, Shard] = {}
    for name, weight in weights.items():
        state = optimizer.state[weight.tensor]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.tensor.device)
            state["exp_avg"] = torch.zeros_like(weight.tensor)
            state["exp_avg_sq"] = torch.zeros_like(weight.tensor)
        shards[f"step.{name}"] = Shard(state["step"], (), primary=lead)
        for key in ("exp_avg", "exp_avg_sq"):
            shards[f"{key}.{name}"] = replace(weight, tensor=state[key])
    return shards
