"""Whole runs on several ranks, on Ray: they sample, learn, save and go on like one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.model.ranks import Ranks
from tandem.observe.memory import bytes_in_use, return_freed_memory
from tests.loop.small_run import MODEL, metrics_of, run_command, small_config, write_config
from tests.ranks import RankProcesses
from tests.tiny import tiny_model_folder
from tests.unit.hybrid.made import contrast, rollout, worker_of
from tests.unit.hybrid.on_ranks import start_on_ranks

STEPS = 3
BASE: Mapping[str, Mapping[str, Any]] = {
    "run": {"steps": STEPS},
    "model": {**MODEL, "new": {**MODEL["new"], "num_key_value_heads": 2}},
    "rollout": {"n": 4, "max_response_length": 4},
    "trainer": {"lr": 1e-3, "warmup_steps": 0, "mini_batch_responses": 8},
    "algorithm": {"kl_coef": 0.1},
    "cluster": {"threads": 1},
    "checkpoint": {"every": STEPS},
}
TENSOR_PARALLEL: Mapping[str, Mapping[str, Any]] = {"rollout": {"tensor_parallel": 2}}
ON_RANKS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "two": {"cluster": {"num_workers": 2}, "trainer": {"offload": "disk"}},
    "four": {"cluster": {"num_workers": 4}, "trainer": {"replicas": 2}, **TENSOR_PARALLEL},
}
# Sums over ranks are rounded in another order, in about the seventh digit; a step of AdamW divides by such sums.
RELATIVE, ABSOLUTE = 1e-3, 1e-5
DIFFERENT = ("memory/", "perf/", "timing_s/", "mismatch/")  # what is not of the numbers of the run


def trained(folder: Path, *changes: Mapping[str, Mapping[str, Any]]) -> Path:
    """The folder of a run that has ended."""
    folder.mkdir(exist_ok=True)
    sections: dict[str, dict[str, Any]] = {}
    for change in (BASE, {"run": {"folder": str(folder / "run")}}, *changes):
        for name, section in change.items():
            sections[name] = {**sections.get(name, {}), **section}
    file = write_config(folder / "run.yaml", small_config(folder, sections))
    log = folder / "log"
    assert run_command(["train", str(file)], log) == 0, log.read_text()
    return folder / "run"


def weights_of(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    return load_file(run / f"checkpoints/step_{step:06d}/model/model.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run, on one process and on several."""
    folder = tmp_path_factory.mktemp("ranks")
    return {name: trained(folder / name, change) for name, change in {"alone": {}, **ON_RANKS}.items()}


def same_numbers(runs: Mapping[str, Path], name: str) -> None:
    """Metrics of every step, and the weights at the end, are those of the run of one process."""
    lines, expected = metrics_of(runs[name]), metrics_of(runs["alone"])
    assert len(lines) == len(expected) == STEPS
    for line, line_alone in zip(lines, expected, strict=True):
        assert line.keys() == line_alone.keys()
        unmeasured = {key for key, value in line_alone.items() if value is None}
        assert {key for key, value in line.items() if value is None} == unmeasured
        compared = [key for key in line if not key.startswith(DIFFERENT) and key not in unmeasured]
        assert {key: line[key] for key in compared} == pytest.approx(
            {key: line_alone[key] for key in compared}, rel=RELATIVE, abs=ABSOLUTE
        )
    assert any(line["policy/grad_norm"] > 0 for line in lines), "nothing was learnt"
    weights, weights_alone = weights_of(runs[name]), weights_of(runs["alone"])
    assert weights.keys() == weights_alone.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, weights_alone[key], rtol=0, atol=2e-4)  # a fifth of one update's step


def last_line(run: Path) -> dict[str, float]:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
def test_num_workers_ranks_train_like_one(runs: dict[str, Path]) -> None:
    same_numbers(runs, "two")
    assert last_line(runs["two"])["perf/reshard_gib"] > 0
    assert last_line(runs["alone"])["perf/reshard_gib"] == 0


@pytest.mark.slow
def test_tensor_parallel_ranks_sample_like_one(runs: dict[str, Path]) -> None:
    same_numbers(runs, "four")
    assert responses_of(runs["four"]) == responses_of(runs["alone"])


def responses_of(run: Path) -> list[str]:
    """What was sampled in the first step."""
    return [json.loads(line)["response"] for line in (run / "rollouts/step_000001.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_fault_40_a_run_goes_on_with_another_number_of_workers(runs: dict[str, Path]) -> None:
    """From two ranks to one and to two in another layout, which need no permission."""
    run = runs["two"]
    for steps, change in ((STEPS + 1, {}), (STEPS + 2, {"cluster": {"num_workers": 2}, **TENSOR_PARALLEL})):
        trained(run.parent, change, {"run": {"steps": steps}})
        assert f"going on after step {steps - 1}" in (run.parent / "log").read_text()
        assert [line["step"] for line in metrics_of(run)] == list(range(1, steps + 1))


def rows_of_each(ranks: Ranks, folder: Path, replicas: int) -> dict[str, tuple[int, list[float]]]:
    """Which rows this rank has of each weight."""
    with start_on_ranks(ranks, folder, {"trainer": {"replicas": replicas}}) as workers:
        shards = worker_of(workers).training.weights.shards()
        return {name: (shard.first_row, shard.tensor.flatten().tolist()) for name, shard in shards.items()}


def test_replicas_hold_equal_shards(ranks: RankProcesses, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    of_two, of_two_more, again, again_more = ranks.run(rows_of_each, 4, folder, 2)
    assert of_two == again
    assert of_two_more == again_more
    assert of_two != of_two_more
    one, other, third, fourth = ranks.run(rows_of_each, 4, folder, 1)
    assert len({str(each) for each in (one, other, third, fourth)}) == 4
    quarter, half = (sum(len(values) for _, values in each.values()) for each in (one, of_two))
    assert half == pytest.approx(2 * quarter, rel=0.02)


def memory_in_phases(ranks: Ranks, folder: Path, offload: str) -> tuple[int, int, int, int]:
    """Resident bytes in the train and in the rollout phase; what the moments and the engine's weights take."""
    cpu = torch.device("cpu")
    with start_on_ranks(ranks, folder, {"trainer": {"offload": offload}}) as workers:
        worker = worker_of(workers)
        rollouts = rollout(workers)
        with workers.train_phase() as trainer:
            trainer.update(rollouts, contrast(rollouts))
            return_freed_memory()
            training = bytes_in_use(cpu)
            states = worker.training.optimizer.adamw.state.values()
            moments = sum(tensor.nbytes for state in states for tensor in state.values())
        with workers.rollout_phase():
            return_freed_memory()
            sampling = bytes_in_use(cpu)
            engine = 0 if ranks.alone else sum(weight.nbytes for weight in worker.sampling.engine.model.parameters())
    assert training is not None
    assert sampling is not None
    return training, sampling, moments, engine


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_offload_frees_memory_between_the_phases(ranks: RankProcesses, tmp_path: Path, size: int) -> None:
    """At least 90 % of the moments. There are no gradients after an update, whatever the setting."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "head_dim": 64}
    folder = tiny_model_folder(tmp_path / "model", overrides=shape)
    for training, sampling, moments, engine in ranks.run(memory_in_phases, size, folder, "disk"):
        assert moments > 50e6
        assert training - (sampling - engine) > 0.9 * moments
    for training, sampling, moments, engine in ranks.run(memory_in_phases, size, folder, "none"):
        assert training - (sampling - engine) < 0.5 * moments
