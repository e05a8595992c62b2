"""From a run or checkpoint to a folder that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tandem.checkpoint import complete_or_absent, find_checkpoint
from tandem.errors import CheckpointError
from tandem.model.hf import DTYPES
from tandem.model.tensor_files import copy


def export(run: str | Path, to: str | Path, *, dtype: str = "float32") -> Path:
    """Write the newest checkpoint of a run, or one checkpoint, as a Hugging Face folder.

    Args:
        run: Run folder or checkpoint.
        to: Folder to write; it must not exist. It is complete or absent, never half written.
        dtype: Of the saved weights: float32, as trained, or bfloat16.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged; `to` exists, or cannot be written.
    """
    run, to = Path(run), Path(to)
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is unknown", remedy=f"use one of {', '.join(DTYPES)}")
    checkpoint = find_checkpoint(run)
    if checkpoint is None:
        raise CheckpointError(
            f"{run} is neither a run with a complete checkpoint nor a checkpoint",
            remedy="give a folder that `tandem train` wrote to; its checkpoints are in RUN/checkpoints",
        )
    if to.exists():
        raise CheckpointError(f"{to} exists already", remedy="give a new folder, or remove this one")
    try:
        with complete_or_absent(to) as partial:
            _copy_model(checkpoint / "model", partial, dtype)
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint} cannot be exported: {error}", remedy="it is damaged: give an older checkpoint"
        ) from error
    except OSError as error:
        raise CheckpointError(f"the model cannot be written to {to}: {error}") from error
    return to


def _copy_model(source: Path, folder: Path, dtype: str) -> None:
    """A checkpoint has the files of such a folder already. Its weights are never in memory, but for a few megabytes."""
    shutil.copytree(
        source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json")
    )
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "dtype": dtype}, indent=2, sort_keys=True) + "\n"  # as transformers writes it
    (folder / "config.json").write_text(text, encoding="utf-8")
    copy(source, folder, dtype=DTYPES[dtype])
