"""What the config says of the engine reaches vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tandem as td
from tandem.errors import ModelError
from tandem.rollout.vllm import VllmEngine
from tandem.rollout.vllm_checks import is_installed
from tests.contract.engines import NEEDS_VLLM, TOLERANCE, folder_of, gap, start_with
from tests.unit.hybrid.made import rollout, trainer_logprobs, worker_of


@NEEDS_VLLM
def test_vllm_options_reach_vllm(tmp_path: Path) -> None:
    """So do the options that are called otherwise there; the log-probs are the trainer's in bfloat16, too."""
    options = {"vllm_options": {"block_size": 64}, "max_concurrent": 16, "kv_cache_gib": 0.01}
    folder = folder_of(tmp_path / "model")
    with start_with("vllm", folder, {"rollout": options, "model": {"dtype": "bfloat16"}}) as workers:
        engine = worker_of(workers).sampling.engine
        assert isinstance(engine, VllmEngine)
        config = engine._llm.vllm_config
        assert config.cache_config.block_size == 64
        assert config.cache_config.kv_cache_memory_bytes == int(0.01 * 2**30)
        assert config.scheduler_config.max_num_seqs == 16
        assert config.model_config.max_model_len == 48 + 16
        with pytest.raises(ValueError, match=r"temperature is 0\.005, but vLLM samples at 0\.01 or above"):
            rollout(workers, temperature=0.005)
        rollouts = rollout(workers)
        gaps = (trainer_logprobs(workers, rollouts) - rollouts.rollout_logprobs)[rollouts.response_mask].abs()
        assert float(gaps.mean()) < 0.05  # nats; bfloat16 rounds each product


@NEEDS_VLLM
def test_what_vllm_cannot_do_is_told_before_weights_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    with pytest.raises(td.ConfigError, match="did you mean block_size"):
        start_with("vllm", folder, {"rollout": {"vllm_options": {"blocksize": 64}}})
    with pytest.raises(ModelError, match=r"rollout\.kv_cache_gib is 1e-05"):
        start_with("vllm", folder, {"rollout": {"kv_cache_gib": 1e-5}})


@NEEDS_VLLM
@pytest.mark.parametrize("cache", ["auto", "least"])
def test_one_response_at_a_time_and_one_token_of_each(tmp_path: Path, cache: str) -> None:
    """The least cache that starts is the one that the error names. Prompt and response may be a token each."""
    folder = folder_of(tmp_path / "model")
    rollout_section: dict[str, float] = {"max_response_length": 1, "max_concurrent": 1}
    config = {"data": {"max_prompt_length": 1}, "rollout": rollout_section}
    if cache == "least":
        rollout_section["kv_cache_gib"] = 1e-6
        with pytest.raises(ModelError, match=r"set it to \S+ or more") as raised:
            start_with("vllm", folder, config)
        rollout_section["kv_cache_gib"] = float(str(raised.value).partition("set it to ")[2].split()[0])
    with start_with("vllm", folder, config) as workers, workers.rollout_phase() as phase:
        rollouts = phase.generate([td.Prompt((5,), ""), td.Prompt((6,), "", prompt_id=1)], n=2, step=1)
        assert rollouts.response_lengths.tolist() == [1] * 4
    assert gap(workers, rollouts) < TOLERANCE


@NEEDS_VLLM
def test_an_option_that_changes_the_log_probs_is_found_at_the_first_wake(tmp_path: Path) -> None:
    options = {"vllm_options": {"kv_cache_dtype": "fp8", "block_size": 64}}
    with (
        start_with("vllm", folder_of(tmp_path / "model"), {"rollout": options}) as workers,
        pytest.raises(ModelError, match=r"\n .*leave out rollout\.vllm_options \(kv_cache_dtype, block_size\), or"),
    ):
        rollout(workers)


@NEEDS_VLLM
def test_more_responses_at_once_than_a_step_has_tokens(tmp_path: Path) -> None:
    settings = {"max_concurrent": 4097, "kv_cache_gib": 0.01}
    with start_with("vllm", folder_of(tmp_path / "model"), {"rollout": settings}) as workers:
        assert gap(workers, rollout(workers)) < TOLERANCE


@NEEDS_VLLM
def test_a_start_that_vllm_refuses_is_told_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    with pytest.raises(
        ModelError, match=r"cannot be started with this model: .*block size.*\n .*rollout\.vllm_options"
    ):
        start_with("vllm", folder, {"rollout": {"vllm_options": {"block_size": 7}}})
    with start_with("vllm", folder) as workers:
        assert gap(workers, rollout(workers)) < TOLERANCE


@NEEDS_VLLM
def test_a_process_leaves_no_files_of_vllms(tmp_path: Path) -> None:
    folder, temporary = folder_of(tmp_path / "model"), tmp_path / "temporary"
    temporary.mkdir()
    program = (
        "from pathlib import Path; from tests.contract.engines import start_with\n"
        f"with start_with('vllm', Path({str(folder)!r})): pass\n"
        f"assert list(Path({str(temporary)!r}).glob('vllm_dist_*')), 'what should be gone in the end'"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(temporary)}, check=True)
    assert not list(temporary.glob("vllm_dist_*"))


@pytest.mark.skipif(is_installed(), reason="vLLM is installed")
def test_without_vllm_it_cannot_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(td.ConfigError, match=r"rollout\.engine: is vllm, which is not installed"):
        start_with("vllm", folder_of(tmp_path / "model"))
