"""Where a policy comes from: its model, and with LoRA the base and the adapters on it.

    all weights     the newest checkpoint, else `model`
    LoRA            the base, which stays; the newest checkpoint has the adapters

A base that no other place surely has as long as the run, such as a new model or another run's checkpoint, is kept in
RUN/base: what the adapters are without it, nobody knows.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tandem.checkpoint import complete_or_absent
from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.errors import CheckpointError, ModelError
from tandem.model.adapter_files import fingerprint, is_adapter, read_adapter_config, recorded_base
from tandem.model.build import build_model, new_config
from tandem.model.hf import read_config, save_model
from tandem.model.lora import target_names
from tandem.model.merge import merge_adapter
from tandem.model.skeleton import skeleton
from tandem.model.source import resolve_model_path
from tandem.model.tokenizer import load_tokenizer


def absolute(model: ModelConfig) -> ModelConfig:
    """A local model as the one folder that it is now, for workers which run elsewhere or start later.

    A run folder means its newest checkpoint, and may mean another one in a moment.
    """
    if model.path is None or not Path(model.path).expanduser().exists():
        return model
    return model.model_copy(update={"path": str(Path(resolve_model_path(model.path)).absolute())})


def may_change(model: Path | str) -> bool:
    """Whether this is the model of a checkpoint: its run goes on to a newer one, and deletes it."""
    return isinstance(model, Path) and (model.resolve().parent / "state.json").is_file()


def base_source(model: ModelConfig, run_folder: Path | None) -> ModelConfig:
    """What adapters are put into: `model`, or what the run keeps of it."""
    if run_folder is None or (model.new is None and not may_change(resolve_model_path(str(model.path)))):
        return absolute(model)
    return model.model_copy(update={"path": str(run_folder.absolute() / "base"), "new": None, "tokenizer": None})


def policy_source(config: Config, run_folder: Path | None, checkpoint: Path | None) -> tuple[ModelConfig, Path | None]:
    """Where the policy's weights come from, and the folder of the adapters to go on with, if there are any.

    Args:
        config: Resolved.
        run_folder: None = there is none.
        checkpoint: The run's newest one.

    Raises:
        CheckpointError: The checkpoint does not go with the config's LoRA settings, or its base is gone or changed;
            the base cannot be written.
    """
    model = config.model
    saved = None if checkpoint is None else checkpoint / "model"
    if saved is not None and is_adapter(saved) != (model.lora_rank > 0):
        trained = "adapters" if is_adapter(saved) else "all weights"
        raise CheckpointError(
            f"model.lora_rank is {model.lora_rank}, but the checkpoint {checkpoint} is of a run that trained {trained}",
            remedy="set model.lora_rank as it was, or take another run.folder",
        )
    if model.lora_rank == 0:
        if saved is None:
            return absolute(model), None
        return model.model_copy(update={"path": str(saved), "new": None, "tokenizer": None}), None
    base = base_source(model, run_folder)
    if saved is not None:
        _check_same(model, base, saved)
    elif base.path is not None and base.path != absolute(model).path:
        _keep_base(model, Path(base.path), seed=config.run.seed)
    return base, saved


def _check_same(model: ModelConfig, base: ModelConfig, saved: Path) -> None:
    """The adapters of a checkpoint are those that the config asks for, on the base that they were trained on."""
    recorded = recorded_base(saved)
    try:
        found = fingerprint(str(base.path))
    except ModelError as error:
        raise CheckpointError(
            f"{saved.parent} holds adapters, and their base cannot be read: {error.message}",
            remedy=f"bring it back to {base.path} as it was, or take another run.folder to begin anew",
        ) from error
    was = read_adapter_config(saved)
    now = {
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "target_modules": target_names(skeleton(read_config(base)), model.lora_targets),
    }
    keys = {"r": "model.lora_rank", "lora_alpha": "model.lora_alpha", "target_modules": "model.lora_targets"}
    changes = [f"{key} is {now[name]}, and was {was[name]}" for name, key in keys.items() if now[name] != was[name]]
    if changes:
        raise CheckpointError(
            f"the adapters of {saved.parent} have other settings: {'; '.join(changes)}",
            remedy="set them as they were, or take another run.folder",
        )
    if found != recorded.fingerprint:
        raise CheckpointError(
            f"{saved.parent} holds adapters for {recorded.path!r} as it was; the weights of {base.path!r} are others",
            remedy=f"bring the weights of then back to {base.path}, or take another run.folder to begin anew",
        )


def _keep_base(model: ModelConfig, folder: Path, *, seed: int) -> None:
    """In place of that of an earlier beginning of this run."""
    try:
        with complete_or_absent(folder) as partial:
            if model.new is not None:
                tokenizer = load_tokenizer(model)
                built = build_model(new_config(model.new, tokenizer), seed=seed, device=torch.device("cpu"))
                save_model(built, partial, tokenizer=tokenizer)
            else:
                source = Path(resolve_model_path(str(model.path)))
                shutil.copytree(source, partial, dirs_exist_ok=True)
                merge_adapter(partial, dtype=torch.float32, source=source)
    except OSError as error:
        raise CheckpointError(
            f"the base of the adapters cannot be written to {folder}: {error}",
            remedy="free disk space or set run.folder to another disk, then start the same command again",
        ) from error
