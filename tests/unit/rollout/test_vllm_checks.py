"""What is wrong with vLLM is said before it is started."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from tandem.errors import ConfigError, ModelError
from tandem.rollout.vllm_checks import cache_bytes_needed, check_installed, check_model, check_options, is_installed
from tandem.rollout.vllm_process import starting_vllm
from tests.contract.engines import NEEDS_VLLM
from tests.tiny import tiny_model

CONFIG = tiny_model(overrides={"head_dim": 32}).config
SETTINGS = {"dtype": torch.float32, "on_cpu": True, "max_length": 300, "cache_bytes": None}


@pytest.mark.skipif(is_installed(), reason="vLLM is installed")
def test_without_vllm_the_error_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine: is vllm, which is not installed\n .*make vllm"):
        check_installed()


@NEEDS_VLLM
def test_options_that_vllm_lacks_and_those_that_are_ours_are_all_told() -> None:
    check_options({}, on_cpu=True)
    check_options({"block_size": 64}, on_cpu=True)
    check_options({"enforce_eager": False}, on_cpu=False)
    wrong = {"blok_size": 64, "max_num_seqs": 8, "load_format": "auto", "xyzzy": 1, "enforce_eager": False}
    with pytest.raises(ConfigError) as raised:
        check_options(wrong, on_cpu=True)
    text = str(raised.value)
    assert "vLLM has no option blok_size\n      -> did you mean block_size?" in text
    assert "max_num_seqs is Tandem's to set\n      -> set rollout.max_concurrent instead" in text
    assert "load_format is Tandem's to set\n      -> leave it out" in text
    assert "vLLM has no option xyzzy" in text
    assert "enforce_eager=false has no effect on CPUs" in text


@NEEDS_VLLM
@pytest.mark.parametrize(
    "name",
    ["model_impl", "stream_interval", "speculative_config", "spec_method", "worker_cls", "scheduler_cls", "runner"],
)
def test_options_that_would_change_what_is_computed_or_what_is_handed_out_are_refused(name: str) -> None:
    """With stream_interval, tokens after a stop string; of a draft's tokens, log-probs of another distribution."""
    with pytest.raises(ConfigError, match=f"{name} is Tandem's to set\n .*leave it out"):
        check_options({name: "x"}, on_cpu=True)


@NEEDS_VLLM
@pytest.mark.parametrize("architecture", ["Olmo2ForCausalLM", "SmolLM3ForCausalLM", "PhiForCausalLM"])
def test_models_that_vllm_would_run_with_the_trainers_own_code_are_refused(architecture: str) -> None:
    with pytest.raises(ModelError, match=f"no code of its own for {architecture}.*\n .*rollout.engine=embedded"):
        check_model(CONFIG, architecture, **SETTINGS)


@NEEDS_VLLM
def test_models_that_vllm_cannot_serve_are_told() -> None:
    check_model(CONFIG, "Qwen3ForCausalLM", **SETTINGS)
    with pytest.raises(ModelError, match=r"vLLM has no NoSuchForCausalLM\n .*rollout\.engine=embedded"):
        check_model(CONFIG, "NoSuchForCausalLM", **SETTINGS)
    small = tiny_model(overrides={"head_dim": 16}).config
    with pytest.raises(ModelError, match="no attention on CPUs for heads of size 16, only for 32, 64"):
        check_model(small, "Qwen3ForCausalLM", **SETTINGS)
    check_model(small, "Qwen3ForCausalLM", **{**SETTINGS, "on_cpu": False})


@NEEDS_VLLM
def test_a_cache_without_room_for_a_sequence_is_told() -> None:
    needed = cache_bytes_needed(CONFIG, 300, torch.float32)
    check_model(CONFIG, "Qwen3ForCausalLM", **{**SETTINGS, "cache_bytes": needed})
    with pytest.raises(ModelError, match=r"rollout\.kv_cache_gib is .* of one sequence of 300 tokens take .*\n .*set"):
        check_model(CONFIG, "Qwen3ForCausalLM", **{**SETTINGS, "cache_bytes": needed - 1})


def test_the_cache_of_a_sequence() -> None:
    """Two layers, two heads of keys and of values, 32 wide, 384 tokens in blocks of 128, and a block for vLLM."""
    assert cache_bytes_needed(CONFIG, 300, torch.float32) == 2 * 2 * 2 * 32 * 512 * 4
    assert cache_bytes_needed(CONFIG, 300, torch.bfloat16, tensor_parallel=2) == 2 * 2 * 1 * 32 * 512 * 2
    assert cache_bytes_needed(CONFIG, 300, torch.float32, sequences=3) == 2 * 2 * 2 * 32 * (3 * 384 + 128) * 4


def test_what_a_start_changes_in_the_process_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_KEPT", "before")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    threads = torch.set_num_threads
    with starting_vllm():
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        os.environ.update({"LD_PRELOAD": "x", "TANDEM_TEST_KEPT": "after", "VLLM_TEST": "1"})
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        torch.set_num_threads = print
    assert "LD_PRELOAD" not in os.environ
    assert os.environ["TANDEM_TEST_KEPT"] == "before"
    assert os.environ.pop("VLLM_TEST") == "1", "vLLM reads its own while it works"
    assert torch.set_num_threads is threads
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_vllm_compiles_no_function_on_cpus_and_everybody_else_still_can() -> None:
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compiled.append("something")
        return graph

    with starting_vllm():
        vllms = torch.compile(lambda x: x + 1, backend=backend)
    assert vllms(torch.zeros(1)).item() == 1
    assert bool(compiled) == torch.cuda.is_available()
    compiled.clear()
    assert torch.compile(lambda x: x + 2, backend=backend)(torch.zeros(1)).item() == 2
    assert compiled
