"""A whole model from an adapter: the files of its base, with what the adapter adds to some of their tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tandem.config.model import ModelConfig
from tandem.model.adapter_files import find_base, is_adapter, read_deltas, remove_adapter
from tandem.model.file_names import FileNames
from tandem.model.hf import read_config
from tandem.model.skeleton import skeleton
from tandem.model.source import weights_folder
from tandem.model.tensor_files import copy, stored_tensors


def merge_adapter(folder: Path, *, dtype: torch.dtype, source: Path | None = None) -> None:
    """Make the folder of an adapter one of a whole model, in place. Does nothing where it is one.

    Of the weights no more than a few megabytes are in memory.

    Args:
        folder: As `save_adapter` writes it.
        dtype: Of the weights that are written. The sums are taken in float32.
        source: The adapter that `folder` is a copy of, by which messages name it. It may lie beside its base.

    Raises:
        ModelError: The adapter is damaged; its base is gone, or another model by now.
        OSError: The files cannot be written.
    """
    if not is_adapter(folder):
        return
    base = weights_folder(find_base(source or folder))
    deltas = read_deltas(folder)
    names = FileNames(skeleton(read_config(ModelConfig(path=str(folder)))))
    stored_names = {piece.name: stored_name for stored_name, piece in names.find(stored_tensors(base)).items()}
    copy(base, folder, dtype=dtype, deltas={stored_names[name]: delta for name, delta in deltas.items()})
    remove_adapter(folder)
    write_dtype(folder, dtype)


def write_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Say in a model's config.json what its weights are saved in."""
    path = folder / "config.json"
    fields = {**json.loads(path.read_text(encoding="utf-8")), "dtype": str(dtype).removeprefix("torch.")}
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")  # as transformers writes it
