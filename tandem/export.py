"""From a run or checkpoint to a folder that transformers loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from tandem.checkpoint import complete_or_absent, find_checkpoint
from tandem.errors import CheckpointError
from tandem.model.adapter_files import STEM, is_adapter
from tandem.model.hf import DTYPES
from tandem.model.merge import merge_adapter, write_dtype
from tandem.model.tensor_files import copy


def export(run: str | Path, to: str | Path, *, dtype: str = "float32", adapter: bool = False) -> Path:
    """Write the newest checkpoint of a run, or one checkpoint, as a Hugging Face folder.

    Where adapters were trained (`model.lora_rank`), they are merged into their base.

    Args:
        run: Run folder or checkpoint.
        to: Folder to write; it must not exist. It is complete or absent, never half written.
        dtype: Of the saved weights: float32, as trained, or bfloat16.
        adapter: Write the adapters alone, as `peft.PeftModel.from_pretrained(base, folder)` reads them.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged; it has no adapters to write alone; `to` exists, or
            cannot be written.
        ModelError: The base of the adapters is gone, or another model by now.
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
    if adapter and not is_adapter(checkpoint / "model"):
        raise CheckpointError(
            f"{checkpoint} has no adapter: all weights were trained", remedy="export the model, without --adapter"
        )
    try:
        with complete_or_absent(to) as partial:
            if adapter:
                _copy_adapter(checkpoint / "model", partial, dtype)
            else:
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
    if is_adapter(source):
        shutil.copy(source / f"{STEM}.safetensors", folder)
        merge_adapter(folder, dtype=DTYPES[dtype], source=source)
        return
    write_dtype(folder, DTYPES[dtype])
    copy(source, folder, dtype=DTYPES[dtype])


def _copy_adapter(source: Path, folder: Path, dtype: str) -> None:
    """What peft reads, and the tokenizer. The policy's config would make some readers take it for a whole model."""
    others = ("*.safetensors", "config.json", "generation_config.json", "base.json")
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*others))
    copy(source, folder, dtype=DTYPES[dtype], stem=STEM)
