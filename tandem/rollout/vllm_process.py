"""What vLLM does to the process that it runs in, and how that is undone."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

# vLLM's own interface to whoever runs it in process; read at its import and while it works.
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine works in this process, where the trainer's weights are
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_NOT_COMPILED = "TORCHDYNAMO_DISABLE"  # read where a function is decorated, and by no other code once vLLM has started
_OVERRULING = "VLLM_CPU_KVCACHE_SPACE"  # in whole GiB, against rollout.kv_cache_gib


@contextmanager
def starting_vllm() -> Generator[None]:
    """Import vLLM and make an engine within this block; what else it has changed is put back after it.

    While it starts, it seeds the generators of Python, numpy and torch, and sets environment variables that every
    process started later would inherit (LD_PRELOAD among them). On CPUs it replaces `torch.set_num_threads` by a
    function that does nothing, for good: then neither Tandem's nor the user's own settings would hold any more.

    Where there is no GPU, none of its functions is compiled: that takes a C++ compiler, and ten seconds or more.
    """
    before, set_num_threads = dict(os.environ), torch.set_num_threads
    numpy_state, python_state = np.random.get_state(), random.getstate()
    os.environ.update({key: os.environ.get(key, value) for key, value in _SETTINGS.items()})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = _SETTINGS["VLLM_ENABLE_V1_MULTIPROCESSING"]
    os.environ.pop(_OVERRULING, None)
    if not torch.cuda.is_available():
        os.environ[_NOT_COMPILED] = "1"
    try:
        with torch.random.fork_rng(devices=_devices()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        _restore(before)


def _devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []


def _restore(before: Mapping[str, str]) -> None:
    """Environment variables but vLLM's own, which it reads while it works."""
    for key in [*os.environ]:
        if key not in before and not key.startswith("VLLM_"):
            del os.environ[key]
    os.environ.update({key: value for key, value in before.items() if not key.startswith("VLLM_")})
