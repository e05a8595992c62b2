"""Where a model comes from: a folder, a run, a checkpoint, or a name on the hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HTTPError, RepositoryNotFoundError

from tandem.errors import ModelError

_HUB_TIMEOUT_S = 10
_STEP = re.compile(r"step_(\d{6,})")  # a checkpoint has this name only once it is complete


def complete_checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folder = run_folder / "checkpoints"
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def resolve_model_path(path: str | Path, *, key: str = "model.path") -> Path | str:
    """Find the Hugging Face folder that `path` means; a name that is no local path is the hub's, and returned as is.

    Args:
        path: A Hugging Face folder; a checkpoint (`RUN/checkpoints/step_000020`, its weights are in `model/`); a run
            folder, which means its newest complete checkpoint; or a hub name, such as `Qwen/Qwen3-0.6B`.
        key: The config key that gave it, for messages.

    Raises:
        ModelError: The path is local, and there is no model.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if isinstance(path, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and path[0] not in "./":
            return path
        raise ModelError(
            f"{key}: {str(path)!r} does not exist",
            remedy=f"give a hub name, or a folder as seen from the one that the command runs in, here {Path.cwd()}",
        )
    if folder.is_file():
        raise ModelError(f"{key}: {str(path)!r} is a file", remedy=_remedy_for_file(folder))
    if (folder / "config.json").is_file():
        return folder
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    if checkpoints := complete_checkpoints(folder):
        return checkpoints[-1] / "model"
    if (folder / "checkpoints").is_dir():
        raise ModelError(
            f"{key}: the run {str(folder)!r} has no complete checkpoint",
            remedy="let it run until its first checkpoint (checkpoint.every), or give another model",
        )
    raise _no_model(folder, key)


def check_hub_name(name: str, key: str = "model.path") -> None:
    """Ask the hub once whether it has this name, unless it has been loaded before: a mistyped folder looks like one.

    transformers would try for more than a minute. Of a hub that is too busy to answer nothing is said.

    Raises:
        ModelError: The hub does not know the name, or cannot be reached.
    """
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "tokenizer_config.json")):
        return
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except (HTTPError, OSError, ValueError) as error:
        is_unknown = isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)
        if isinstance(error, HfHubHTTPError) and not is_unknown:
            return
        reason = "the hub has no such model" if is_unknown else f"the hub cannot be reached: {error}"
        raise ModelError(
            f"{key}: {name!r} is no folder in {Path.cwd()}, and as a name on the hub it fails: {reason}",
            remedy="give a Hugging Face model folder, a run folder, a checkpoint, or a hub name that can be reached",
        ) from error


def weights_folder(path: str) -> Path:
    """The local folder with the safetensors files of the model that `path` means. A hub's are downloaded, once.

    Raises:
        ModelError: The path is local, and there is no model.
        OSError: The hub cannot be reached, or has no such model.
    """
    folder = resolve_model_path(path)
    if isinstance(folder, Path):
        return folder
    # Nothing else: some models keep a second copy of their weights beside these.
    return Path(snapshot_download(folder, allow_patterns=["model*.safetensors", "model.safetensors.index.json"]))


def weights_problems(folder: Path | str, *, key: str = "model.path") -> list[ModelError]:
    """What is wrong with the weight files of a Hugging Face folder: only safetensors are read.

    Of a hub name nothing is said: its files are not here yet.
    """
    if isinstance(folder, str):
        return []
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    start = f"{key}: {str(folder)!r}"
    if any(name.endswith(".safetensors") for name in names):
        return []
    pickled = [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
    if pickled:
        return [
            ModelError(
                f"{start} has its weights as a pickle only ({pickled[0]}), which can run code when it is read",
                remedy="convert them: load the model with transformers and save it again with save_pretrained",
            )
        ]
    if any(name.endswith(".gguf") for name in names):
        return [ModelError(f"{start} has its weights as GGUF only", remedy=_GGUF_REMEDY)]
    return [ModelError(f"{start} has no weights", remedy="it needs model.safetensors, or its shards")]


def foreign_code(key: str, name: str | Path) -> ModelError:
    """The refusal to run Python code that comes with a model or a tokenizer."""
    return ModelError(
        f"{key}: {str(name)!r} needs Python code that is shipped with it, and such code is not run",
        remedy="read that code; if you trust it, set model.trust_remote_code=true",
    )


_GGUF_REMEDY = "convert it to a Hugging Face folder; examples/prepare_smollm2.py shows how"


def _remedy_for_file(file: Path) -> str:
    if file.suffix == ".gguf":
        return _GGUF_REMEDY
    return f"give the folder that holds config.json and the weights, perhaps {str(file.parent)!r}"


def _no_model(folder: Path, key: str) -> ModelError:
    names = sorted(entry.name for entry in folder.iterdir())
    if "adapter_config.json" in names:
        return ModelError(
            f"{key}: {str(folder)!r} holds an adapter, not a whole model", remedy="merge it into its base model first"
        )
    if any(name.endswith(".gguf") for name in names):
        return ModelError(f"{key}: {str(folder)!r} holds a GGUF file, not a Hugging Face model", remedy=_GGUF_REMEDY)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
    return ModelError(
        f"{key}: {str(folder)!r} has no config.json; it holds {shown}",
        remedy="give a Hugging Face model folder, a run folder, a checkpoint, or a hub name",
    )
