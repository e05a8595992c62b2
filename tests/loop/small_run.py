"""Whole runs of a model of two thousand weights: started like a command, killed, compared to the bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from tandem import cli
from tandem.observe.metrics import VOLATILE
from tests.tiny import write_jsonl

# Processes are forked from one that has imported everything: 0.3 s instead of 5 s for each of dozens of starts.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tandem.cli", "tandem.train", "tests.loop.small_run"])

REWARD = """
def score(response, ground_truth):
    return 1.0 if ground_truth in response else response.count("1") / 8
"""
ROWS = [{"prompt": f"{left}+{right}=", "ground_truth": str(left + right)} for left in range(3) for right in range(4)]
MODEL = {
    "new": {
        "architecture": "Qwen3ForCausalLM",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 32,
    },
    "tokenizer": {"characters": "0123456789+="},
}
SMALL: Mapping[str, Any] = {
    "run": {"steps": 4, "folder": "run"},
    "model": MODEL,
    "data": {"train": "train.jsonl", "prompts_per_step": 4, "max_prompt_length": 8},
    "rollout": {"n": 4, "max_response_length": 4},
    "reward": {"function": "reward.py:score", "workers": 1},
    "trainer": {"lr": 1e-2, "warmup_steps": 0},
    "checkpoint": {"every": 1},
    "cluster": {"threads": 1},
}


def small_config(folder: Path, changes: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """`SMALL` with `changes`, section by section, and its files in `folder`, all paths absolute."""
    config = {name: dict(section) for name, section in SMALL.items()}
    config["run"]["folder"] = str(folder / "run")
    config["data"]["train"] = str(write_jsonl(folder / "train.jsonl", ROWS))
    (folder / "reward.py").write_text(REWARD)
    config["reward"]["function"] = f"{folder / 'reward.py'}:score"
    for name, section in (changes or {}).items():
        config[name] = {**config.get(name, {}), **section}
    return config


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
    """The config as a YAML file. Returns `path`."""
    path.write_text(yaml.safe_dump(dict(config)))
    return path


def start_command(arguments: Sequence[str], log: Path) -> ForkServerProcess:
    """Start `tandem <arguments>` in a process of its own; what it prints is appended to `log`."""
    process = _server.Process(target=_command, args=(list(arguments), str(log)))
    process.start()
    return process


def run_command(arguments: Sequence[str], log: Path) -> int:
    """`start_command` to its end; returns the exit code."""
    return exit_code(start_command(arguments, log))


def start_function(function: Callable[..., object], log: Path, *arguments: object) -> ForkServerProcess:
    """Call a function of a module in a process of its own; what it prints is appended to `log`."""
    process = _server.Process(target=_function, args=(function, str(log), arguments))
    process.start()
    return process


def exit_code(process: ForkServerProcess) -> int:
    """Wait for its end."""
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _command(arguments: list[str], log: str) -> None:
    _print_to(log)
    sys.argv = ["tandem", *arguments]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and the command would leave it so
    cli.main()


def _function(function: Callable[..., object], log: str, arguments: tuple[object, ...]) -> None:
    _print_to(log)
    function(*arguments)


def _print_to(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, without what depends on the machine's mood."""
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(VOLATILE)}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def traces_of(run: Path) -> dict[str, object]:
    """All that a run leaves behind which must not depend on how often it was killed."""
    traces: dict[str, object] = {"metrics": metrics_of(run)}
    for folder in ("checkpoints", "rollouts", "reference"):
        for path in _files(run / folder):
            name = str(path.relative_to(run))
            if path.suffix == ".safetensors":  # the order of its metadata is that of a hash map
                traces |= {f"{name}:{key}": value.numpy().tobytes() for key, value in load_file(path).items()}
            elif path.name != "tokenizer_config.json":  # transformers notes there where it was loaded from
                traces[name] = path.read_bytes()
    return traces


def differences(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Names under which two runs differ: short, where the bytes themselves would fill the screen."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
