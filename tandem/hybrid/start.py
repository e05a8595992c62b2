"""Start the workers: for a run that a config describes, or by hand in a notebook."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.algorithm.protocols import Loss, LossFunction
from tandem.checkpoint import CheckpointWriter, find_checkpoint
from tandem.config.cluster import ClusterConfig
from tandem.config.load import config_from_dict
from tandem.config.model import ModelConfig
from tandem.config.presets import preset_of
from tandem.config.resolve import resolve_config
from tandem.config.schema import Config
from tandem.errors import CheckpointError, ConfigError, ModelError, Problem
from tandem.hybrid.adapted import absolute, policy_source
from tandem.hybrid.critic_config import check_critic, critic_config
from tandem.hybrid.engine_checks import check_engine
from tandem.hybrid.phases import Watch
from tandem.hybrid.reference import check_reference, find_reference
from tandem.hybrid.several import check_devices, check_layouts
from tandem.hybrid.shared_folder import check_shared, marked
from tandem.hybrid.train_settings import train_settings
from tandem.hybrid.worker import Worker
from tandem.hybrid.worker_options import WorkerOptions
from tandem.hybrid.workers import Workers
from tandem.model.facts import ModelFacts, check_model
from tandem.model.hf import DTYPES
from tandem.model.ranks import Ranks
from tandem.model.tokenizer import load_tokenizer
from tandem.rollout.stop import split_stop
from tandem.rollout.vllm_checks import is_installed
from tandem.runtime.local import ComputeSettings, LocalGroup
from tandem.runtime.worker_group import WorkerGroup

_GIB = 1 << 30
MakeGroup = Callable[[ClusterConfig, Callable[[Ranks], Worker]], WorkerGroup[Worker]]


def resolve_here(config: Config, *, name: str = "run") -> Config:
    """Decide every `auto` that this machine decides: `resolve_config` with its CPUs and GPUs.

    Raises:
        ConfigError: The settings do not fit this machine.
    """
    # What this process may use. Only Linux tells it; elsewhere it is what the machine has.
    num_cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    num_gpus = torch.cuda.device_count()
    return resolve_config(config, num_cpus=num_cpus, num_gpus=num_gpus, has_vllm=is_installed(), name=name)


def start(
    model: str | Path | None = None,
    *,
    lr: float | None = None,
    num_workers: int = 1,
    seed: int = 0,
    config: dict[str, Any] | None = None,
) -> Workers:
    """Start workers for a loop of your own: one in this process, or several on Ray, one for each device.

    Args:
        model: Folder, hub name, run or checkpoint.
        lr: Learning rate of AdamW, constant from the first step unless `config` or its preset says otherwise. None =
            the preset's, or 1e-6.
        num_workers: How many. End them with `workers.close()`, or use them in a `with` block.
        seed: Of sampling noise and of mini-batches.
        config: Anything else, in the sections of the config: {"trainer": {"packing": "varlen"}}.

    Raises:
        ConfigError, ModelError, ClusterError: All that is wrong, before weights are loaded.
    """
    sections = {name: dict(section) for name, section in (config or {}).items()}
    if model is not None:
        sections.setdefault("model", {})["path"] = str(model)
    sections.setdefault("run", {}).setdefault("seed", seed)
    if num_workers != 1:
        sections.setdefault("cluster", {}).setdefault("num_workers", num_workers)
    trainer_section = sections.setdefault("trainer", {})
    if lr is not None:
        trainer_section.setdefault("lr", lr)
    preset = preset_of(sections)
    if preset is None or "trainer.warmup_steps" not in preset.settings:
        trainer_section.setdefault("warmup_steps", 0)
    loaded = resolve_here(config_from_dict(sections, need_data=False, need_reward=False))
    check_devices(loaded)
    check_layouts(loaded)
    check_engine(loaded)
    check_reference(loaded, of_run=False)
    check_critic(loaded, of_run=False)
    trainer, steps = loaded.trainer, loaded.run.steps
    if trainer.lr_schedule != "constant" and steps is None:
        message = f"{trainer.lr_schedule} has no effect: td.start does not know the number of steps"
        raise ConfigError([Problem("trainer.lr_schedule", message, "set run.steps in `config`, too")])
    return _start(loaded, run_folder=None, total_steps=steps)


def start_workers(
    config: Config,
    *,
    total_steps: int | None = None,
    loss: Loss | LossFunction | None = None,
    watch: Watch | None = None,
    resume: bool = True,
) -> Workers:
    """Start the workers of a run. Its newest checkpoint, if there is one, gives the weights.

    Args:
        config: Resolved (`resolve_here`).
        total_steps: At which a falling learning rate ends.
        loss: Instead of the clipped surrogate that the config describes.
        watch: Is told how long things take, and what the workers measure.
        resume: False = take the weights of `model`, save no checkpoint.
    """
    assert config.run.folder is not None, "the config is not resolved"
    run_folder = Path(config.run.folder) if resume else None
    return _start(config, run_folder=run_folder, total_steps=total_steps, loss=loss, watch=watch)


def check_lengths(config: Config, facts: ModelFacts) -> None:
    """Raise ModelError where prompts and responses can be longer than the model's context."""
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    positions, note = facts.context
    if positions is not None and longest > positions:
        raise ModelError(
            f"data.max_prompt_length={config.data.max_prompt_length} and rollout.max_response_length="
            f"{config.rollout.max_response_length} are {longest} tokens together, but the model has {positions} "
            f"positions{note}",
            remedy=f"lower one of them, so that both together are at most {positions}",
        )


def _start(
    config: Config,
    *,
    run_folder: Path | None,
    total_steps: int | None,
    loss: Loss | LossFunction | None = None,
    watch: Watch | None = None,
    make_group: MakeGroup | None = None,
) -> Workers:
    run_folder = None if run_folder is None else run_folder.absolute()  # workers may run in another folder
    checkpoint = find_checkpoint(run_folder) if run_folder is not None else None
    with _errors_of(checkpoint):
        source, adapter = policy_source(config, run_folder, checkpoint)
        tokenizer = load_tokenizer(source)
        facts = check_model(source)
    split_stop(config.rollout.stop, tokenizer)  # raises where one cannot be found
    if run_folder is not None:
        check_lengths(config, facts)
    train = train_settings(config, total_steps=total_steps, loss=loss)
    reference, kept = find_reference(config, run_folder, needed=train.needs_reference)
    several = config.cluster.num_workers > 1
    with _errors_of(checkpoint), marked(run_folder) if several and run_folder else nullcontext() as mark:
        options = _worker_options(config, source, facts, run_folder, adapter=adapter, measure_memory=watch is not None)
        group = (make_group or _make_group)(config.cluster, lambda ranks: _make_worker(options, tokenizer, ranks, mark))
    writer = None
    if run_folder is not None:
        saving = config.checkpoint
        writer = CheckpointWriter(
            run_folder,
            keep=saving.keep,
            keep_best=saving.keep_best,
            metric=config.evaluation.metric,
            background=saving.background,
        )
    return Workers(
        group,
        tokenizer=tokenizer,
        facts=facts,
        rollout=config.rollout,
        train=train,
        reference=absolute(reference),
        kept_reference=kept,
        writer=writer,
        checkpoint=checkpoint,
        watch=watch,
    )


@contextmanager
def _errors_of(checkpoint: Path | None) -> Generator[None]:
    """A model that comes from a checkpoint and cannot be loaded is not the fault of the config's `model.path`."""
    try:
        yield
    except ModelError as error:
        if checkpoint is None:
            raise
        raise CheckpointError(
            f"{checkpoint} cannot be loaded: {error.message}",
            remedy="it is damaged: delete this checkpoint folder to use an older one",
        ) from error


def _make_worker(options: WorkerOptions, tokenizer: PreTrainedTokenizerBase, ranks: Ranks, mark: Path | None) -> Worker:
    if mark is not None:
        check_shared(mark)
    return Worker(options, tokenizer, ranks)


def _make_group(cluster: ClusterConfig, make_worker: Callable[[Ranks], Worker]) -> WorkerGroup[Worker]:
    """The workers: one in this process, or several on Ray."""
    if cluster.num_workers == 1:
        return LocalGroup(make_worker, _compute_settings(cluster))
    from tandem.runtime.ray import RayGroup  # Ray is an extra

    return RayGroup(
        make_worker,
        _compute_settings(cluster),
        num_workers=cluster.num_workers,
        device_type=cluster.device,
        address=cluster.address,
    )


def _compute_settings(cluster: ClusterConfig) -> ComputeSettings:
    assert cluster.threads != "auto", "the config is not resolved"
    assert cluster.deterministic != "auto"
    return ComputeSettings(threads=cluster.threads, deterministic=cluster.deterministic)


def _worker_options(
    config: Config,
    source: ModelConfig,
    facts: ModelFacts,
    run_folder: Path | None,
    *,
    adapter: Path | None,
    measure_memory: bool,
) -> WorkerOptions:
    assert config.model.dtype != "auto", "the config is not resolved"
    assert config.cluster.device != "auto"
    assert config.trainer.offload != "auto"
    assert config.rollout.engine != "auto"
    assert config.cluster.deterministic != "auto"
    cache = config.rollout.kv_cache_gib
    return WorkerOptions(
        model=source,
        trainer=config.trainer,
        critic=critic_config(config),
        facts=facts,
        device=torch.device(config.cluster.device),
        dtype=DTYPES[config.model.dtype],
        head_dtype=DTYPES[config.model.head_dtype],
        max_sequence=config.data.max_prompt_length + config.rollout.max_response_length,
        engine=config.rollout.engine,
        vllm_options=config.rollout.vllm_options,
        deterministic=config.cluster.deterministic,
        max_concurrent=config.rollout.max_concurrent,
        kv_cache_bytes=None if cache == "auto" else int(cache * _GIB),
        tensor_parallel=config.rollout.tensor_parallel,
        offload=config.trainer.offload,
        offload_folder=Path(tempfile.gettempdir()) if run_folder is None else run_folder / "offload",
        measure_memory=measure_memory,
        adapter=adapter,
        seed=config.run.seed,
    )
