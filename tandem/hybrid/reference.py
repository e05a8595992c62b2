"""Where the reference comes from: the model that a KL term holds the policy to."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoint import find_checkpoint
from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.errors import CheckpointError
from tandem.hybrid.adapted import base_source, may_change
from tandem.model.facts import check_reference_model, plain_config
from tandem.model.source import resolve_model_path
from tandem.model.tokenizer import check_same_tokens


@dataclass(frozen=True)
class KeptReference:
    """A reference that the run keeps itself."""

    folder: Path
    source: Path | None = None  # what to copy; None = the policy as it is before the first step


def check_reference(config: Config, *, of_run: bool = True) -> None:
    """Find out before anything is loaded that the reference is nowhere, or cannot be used.

    Args:
        config: Resolved.
        of_run: It is that of a whole run, which has a folder, and whose limits of lengths hold.

    Raises:
        ModelError: Of `algorithm.reference`, with everything that speaks against it.
        CheckpointError: The run to go on with began without a KL term, and did not keep its first model.
    """
    run_folder = Path(config.run.folder) if of_run and config.run.folder is not None else None
    source, kept = find_reference(config, run_folder, needed=config.algorithm.kl_coef > 0)
    if config.algorithm.reference is not None:
        path = str(source.path if kept is None else kept.source)
        check_reference_model(
            source.model_copy(update={"path": path}),
            vocab_size=plain_config(config.model).vocab_size,
            max_sequence=config.data.max_prompt_length + config.rollout.max_response_length if of_run else None,
        )
        check_same_tokens(config.model, path, key="algorithm.reference")
    elif run_folder and kept and not kept.folder.exists() and find_checkpoint(run_folder) is not None:
        raise CheckpointError(
            f"algorithm.kl_coef={config.algorithm.kl_coef:g} needs the model of before the first step, which the "
            f"run in {run_folder} did not keep, since it began without a KL term",
            remedy="set algorithm.reference to the model to stay close to, or take another run.folder",
        )


def find_reference(
    config: Config, run_folder: Path | None, *, needed: bool
) -> tuple[ModelConfig, KeptReference | None]:
    """Where the reference comes from, and how to keep it where no other place surely has it as long as this run.

    With LoRA the initial policy is the base, as long as there was no warm start.
    """
    model = config.model
    if config.algorithm.reference is not None:
        path, kept = _given(config.algorithm.reference, run_folder if needed else None)
        return model.model_copy(update={"path": path, "new": None}), kept
    if model.lora_rank > 0 and config.sft.steps == 0:
        return base_source(model, run_folder), None
    if run_folder is None or not needed:
        return model, None
    if model.new is None and config.sft.steps == 0 and not may_change(resolve_model_path(str(model.path))):
        return model, None
    folder = run_folder / "reference"
    return model.model_copy(update={"path": str(folder), "new": None}), KeptReference(folder)


def _given(given: str, run_folder: Path | None) -> tuple[str, KeptReference | None]:
    """`algorithm.reference` as it is, or the run's copy of it: another reference has a copy of another name."""
    folder = None if run_folder is None else run_folder / f"reference_{zlib.crc32(given.encode()):08x}"
    if folder is not None and folder.exists() and find_checkpoint(folder.parent) is not None:
        return str(folder), None
    source = resolve_model_path(given, key="algorithm.reference")
    if folder is None or isinstance(source, str) or not may_change(source):
        return given, None
    return str(folder), KeptReference(folder, source)
