"""An adapter in a folder, as peft has it, and the model that it belongs to.

adapter_config.json, adapter_model.safetensors      what `peft.PeftModel.from_pretrained(base, folder)` reads
base.json                                           which model that is, so that another one is not taken for it
config.json, generation_config.json, tokenizer      the policy's, so that all but its weights can be read from here
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from tandem.errors import ModelError
from tandem.model.delta import Delta
from tandem.model.shards import Shard
from tandem.model.source import weights_folder
from tandem.model.tensor_files import Piece, read, stored_tensors, write

STEM = "adapter_model"  # of its file of tensors
CONFIG = "adapter_config.json"
BASE = "base.json"
_SAMPLE_BYTES = 256
_ONE_FILE = 1 << 62  # bytes: peft reads no more than one
_PREFIX = "base_model.model."  # that peft gives to the names of a model's modules


@dataclass(frozen=True)
class Base:
    """The model that an adapter was trained on."""

    path: str  # folder or hub name
    fingerprint: str

    @staticmethod
    def of(path: str) -> Base:
        """The model of this path as it is now.

        Raises:
            ModelError: There is none.
        """
        return Base(path, fingerprint(path))

    def save(self, folder: Path) -> None:
        """Write it beside the adapter in `folder`."""
        (folder / BASE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def fingerprint(path: str) -> str:
    """A checksum of a model's weights that reads little: names, dtypes, shapes, and some bytes of each tensor.

    Raises:
        ModelError: There are no weights, or they cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for name, stored in sorted(stored_tensors(weights_folder(path)).items()):
            size = math.prod(stored.shape) * stored.dtype.itemsize
            digest.update(f"{name} {stored.dtype} {stored.shape}".encode())
            with open(stored.file, "rb") as file:
                file.seek(stored.offset + max(0, size - _SAMPLE_BYTES) // 2)
                digest.update(file.read(min(size, _SAMPLE_BYTES)))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the weights of {path!r} cannot be read: {error}",
            remedy="the folder must hold all its safetensors files, unchanged since they were saved",
        ) from error
    return digest.hexdigest()


def is_adapter(folder: Path | str) -> TypeGuard[Path]:
    """Whether this is the folder of an adapter that Tandem has written. A hub name is none."""
    return isinstance(folder, Path) and (folder / BASE).is_file()


def recorded_base(folder: Path) -> Base:
    """The model that the adapter in `folder` was trained on, as it was then; whether it still is, see `find_base`.

    Raises:
        ModelError: The record is damaged.
    """
    try:
        fields = json.loads((folder / BASE).read_text(encoding="utf-8"))
        return Base(str(fields["path"]), str(fields["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / BASE} cannot be read: {error!r}", remedy="take an older checkpoint") from error


def find_base(folder: Path) -> str:
    """Where the model is that the adapter in `folder` belongs to: as recorded, or beside the run's checkpoints.

    Raises:
        ModelError: It is gone, or another one by now.
    """
    recorded = recorded_base(folder)
    beside = folder.parent.parent.parent / "base"  # RUN/base of RUN/checkpoints/step_000020/model, if RUN was moved
    path = str(beside) if not Path(recorded.path).exists() and beside.is_dir() else recorded.path
    try:
        found = fingerprint(path)
    except ModelError as error:
        raise ModelError(
            f"{folder} holds an adapter, and the model that it belongs to cannot be read: {error.message}",
            remedy=f"bring it back to {path}: an adapter is of use beside its base only",
        ) from error
    if found != recorded.fingerprint:
        raise ModelError(
            f"{folder} holds an adapter, and {path!r} is no longer the model that it was trained on: other weights",
            remedy="bring back the model of then: an adapter is of use beside its base only",
        )
    return path


def write_factors(folder: Path, shards: Mapping[str, Shard], names: Mapping[str, Piece], *, lead: bool) -> None:
    """Write this rank's part of an adapter's factors, float32.

    Args:
        folder: Made if missing; the same one for all ranks.
        shards: Of the factors, by the model's names.
        names: `Lora.pieces`.
        lead: See `tensor_files.write`.

    Raises:
        OSError: They cannot be written.
    """
    write(folder, shards, pieces=names, dtype=torch.float32, lead=lead, max_file_bytes=_ONE_FILE, stem=STEM)


def read_factors(folder: Path, into: Mapping[str, Shard], names: Mapping[str, Piece]) -> None:
    """Fill this rank's shards of the factors, in place.

    Raises:
        ModelError: The file is damaged, or holds an adapter of other shapes.
    """
    try:
        read(folder, into, find=lambda stored: {name: names[name] for name in stored if name in names}, stem=STEM)
    except (OSError, ValueError) as error:
        raise ModelError(f"the adapter in {folder} cannot be loaded: {error}") from error


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """What `Lora.save_config` has written into `folder`.

    Raises:
        ModelError: It is damaged.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if missing := {"r", "lora_alpha", "fan_in_fan_out", "target_modules"} - config.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder / CONFIG} cannot be read: {error}") from error
    return config


def read_deltas(folder: Path) -> dict[str, Delta]:
    """What the adapter in `folder` adds to each weight, by the weight's name in the model.

    Raises:
        ModelError: The adapter is damaged.
    """
    config = read_adapter_config(folder)
    scale = config["lora_alpha"] / config["r"]
    try:
        stored = stored_tensors(folder, stem=STEM)
        factors = {name: torch.empty(each.shape) for name, each in stored.items()}
        read(folder, {name: Shard.whole(factor) for name, factor in factors.items()}, stem=STEM)
        return {
            name.removeprefix(_PREFIX).replace(".lora_A.", "."): Delta.of(
                a, factors[name.replace(".lora_A.", ".lora_B.")], scale, transposed=config["fan_in_fan_out"]
            )
            for name, a in factors.items()
            if ".lora_A." in name
        }
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the adapter in {folder} cannot be read: {error!r}") from error


def remove_adapter(folder: Path) -> None:
    """Delete what makes this the folder of an adapter."""
    for file in (CONFIG, BASE, f"{STEM}.safetensors"):
        (folder / file).unlink()
