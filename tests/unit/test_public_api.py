from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import tandem

NAMES = {
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
}


def modules_after(program: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after `program`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(); print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


def test_windows_is_told_at_once_what_to_do() -> None:
    program = "import sys; sys.platform = 'win32'; import tandem"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: Tandem runs on Linux and macOS. On Windows, use it in")


def test_the_public_names_are_these() -> None:
    """Adding one is a promise, removing one breaks somebody's program: change this list on purpose."""
    assert set(tandem.__all__) == NAMES
    assert len(tandem.__all__) == len(NAMES)
    assert dir(tandem) == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(tandem, name)
    own = value.__doc__
    assert own, name
    assert not own.startswith(f"{name}("), f"{name} has only the docstring that dataclasses make"
    if inspect.isfunction(value):
        assert value.__module__.startswith("tandem.")


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        tandem.trian  # noqa: B018


def test_import_loads_neither_torch_nor_anything_else_that_is_slow() -> None:
    loaded = modules_after("import tandem")
    assert not loaded & {"torch", "transformers", "numpy", "pydantic", "yaml", "pyarrow", "datasets", "typer", "rich"}
    assert {name for name in loaded if name.startswith("tandem")} == {"tandem"}


def test_help_and_the_reference_of_options_load_no_torch() -> None:
    """That, not a stopwatch, is what makes `tandem --help` quick."""
    program = """
import sys
from tandem import cli
sys.argv = ["tandem", {argument!r}]
try:
    cli.main()
except SystemExit as end:
    assert not end.code, end.code
"""
    for argument in ("--help", "config"):
        loaded = modules_after(program.format(argument=argument))
        assert "tandem.cli" in loaded
        assert not loaded & {"torch", "transformers", "pyarrow", "datasets"}, argument


def test_rewards_and_config_load_no_torch() -> None:
    loaded = modules_after("import tandem.config, tandem.rewards.worker, tandem.rewards.maths, tandem.errors")
    assert not loaded & {"torch", "transformers"}


@pytest.mark.parametrize("name", ["collect", "evaluate", "prepare", "train"])
def test_a_function_is_not_hidden_by_the_module_of_its_name(name: str) -> None:
    code = f"import tandem.{name}, tandem as td; assert callable(td.{name}), td.{name}"
    subprocess.run([sys.executable, "-c", code], check=True)
