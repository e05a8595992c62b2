"""From a run or checkpoint to a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.checkpoint import complete_or_absent, find_checkpoint
from tandem.config.model import ModelConfig
from tandem.errors import CheckpointError
from tandem.model.hf import DTYPES, load_model, save_model
from tandem.model.tokenizer import load_tokenizer


def export(run: str | Path, to: str | Path, *, dtype: str = "float32") -> Path:
    """Write the newest checkpoint of a run, or one checkpoint, as a Hugging Face folder.

    Args:
        run: Run folder or checkpoint.
        to: Folder to write; it must not exist. It is complete or absent, never half written.
        dtype: Of the saved weights: float32, as trained, or bfloat16.

    Raises:
        CheckpointError: There is no checkpoint, `to` exists, or cannot be written.
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
    source = ModelConfig(path=str(checkpoint / "model"))
    model = load_model(source, device=torch.device("cpu"), dtype=torch.float32)
    try:
        with complete_or_absent(to) as partial:
            save_model(model, partial, tokenizer=load_tokenizer(source), dtype=DTYPES[dtype])
    except OSError as error:
        raise CheckpointError(f"the model cannot be written to {to}: {error}") from error
    return to
