"""Tandem: reinforcement-learning post-training of language models, rollout and training on the same devices.

    import tandem as td

    workers = td.start("Qwen/Qwen3-0.6B", lr=1e-6)
    prompts = td.Prompts("train.parquet", workers.tokenizer, per_step=16)

Names are imported when they are first used: `import tandem` itself takes no time and no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from typing_extensions import override

if sys.platform == "win32":  # worker processes, locks and memory limits are those of Unix
    raise ImportError("Tandem runs on Linux and macOS. On Windows, use it in WSL (the Windows Subsystem for Linux).")

if TYPE_CHECKING:
    from tandem.algorithm.advantages import estimate_advantages, estimate_returns
    from tandem.algorithm.correction import Correction
    from tandem.algorithm.function_loss import FunctionLoss
    from tandem.algorithm.group_advantages import grpo_advantages, rloo_advantages
    from tandem.algorithm.kl import token_kl
    from tandem.algorithm.losses import ClippedSurrogate, grpo_loss
    from tandem.algorithm.masked import masked_mean, token_weights
    from tandem.algorithm.surrogates import clipped_surrogate
    from tandem.batch import CriticUpdate, Evaluation, Prompt, Response, Rewards, Rollouts, UpdateResult
    from tandem.collect import collect, score
    from tandem.config.load import config_from_dict, load_config
    from tandem.config.schema import Config
    from tandem.data.prompts import Prompts, load_prompts
    from tandem.errors import ConfigError, TandemError
    from tandem.evaluate import evaluate
    from tandem.hybrid.start import start, start_workers
    from tandem.hybrid.workers import Workers
    from tandem.observe.stop import Stop
    from tandem.prepare import prepare
    from tandem.rewards.pool import start_rewards
    from tandem.sft import warm_start
    from tandem.train import train
    from tandem.trainer.logprobs import response_logprobs

__version__ = "0.1.0"

_HOMES = {
    "ClippedSurrogate": "tandem.algorithm.losses",
    "Config": "tandem.config.schema",
    "ConfigError": "tandem.errors",
    "Correction": "tandem.algorithm.correction",
    "CriticUpdate": "tandem.batch",
    "Evaluation": "tandem.batch",
    "FunctionLoss": "tandem.algorithm.function_loss",
    "Prompt": "tandem.batch",
    "Prompts": "tandem.data.prompts",
    "Response": "tandem.batch",
    "Rewards": "tandem.batch",
    "Rollouts": "tandem.batch",
    "Stop": "tandem.observe.stop",
    "TandemError": "tandem.errors",
    "UpdateResult": "tandem.batch",
    "Workers": "tandem.hybrid.workers",
    "clipped_surrogate": "tandem.algorithm.surrogates",
    "collect": "tandem.collect",
    "config_from_dict": "tandem.config.load",
    "estimate_advantages": "tandem.algorithm.advantages",
    "estimate_returns": "tandem.algorithm.advantages",
    "evaluate": "tandem.evaluate",
    "grpo_advantages": "tandem.algorithm.group_advantages",
    "grpo_loss": "tandem.algorithm.losses",
    "load_config": "tandem.config.load",
    "load_prompts": "tandem.data.prompts",
    "masked_mean": "tandem.algorithm.masked",
    "prepare": "tandem.prepare",
    "response_logprobs": "tandem.trainer.logprobs",
    "rloo_advantages": "tandem.algorithm.group_advantages",
    "score": "tandem.collect",
    "start": "tandem.hybrid.start",
    "start_rewards": "tandem.rewards.pool",
    "start_workers": "tandem.hybrid.start",
    "token_kl": "tandem.algorithm.kl",
    "token_weights": "tandem.algorithm.masked",
    "train": "tandem.train",
    "warm_start": "tandem.sft",
}

__all__ = [
    "ClippedSurrogate",
    "Config",
    "ConfigError",
    "Correction",
    "CriticUpdate",
    "Evaluation",
    "FunctionLoss",
    "Prompt",
    "Prompts",
    "Response",
    "Rewards",
    "Rollouts",
    "Stop",
    "TandemError",
    "UpdateResult",
    "Workers",
    "clipped_surrogate",
    "collect",
    "config_from_dict",
    "estimate_advantages",
    "estimate_returns",
    "evaluate",
    "grpo_advantages",
    "grpo_loss",
    "load_config",
    "load_prompts",
    "masked_mean",
    "prepare",
    "response_logprobs",
    "rloo_advantages",
    "score",
    "start",
    "start_rewards",
    "start_workers",
    "token_kl",
    "token_weights",
    "train",
    "warm_start",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    value = vars(import_module(_HOMES[name]))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps `td.train` the function. Whoever first imports the module of the same name, `from tandem.train import
    train`, has Python bind the module to the package under that name: here it does not."""

    @override
    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
