"""In bfloat16 engine and trainer round differently: how far they are apart is told as it is, for each engine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tandem as td
from tandem.errors import TrainingError
from tests.contract.engines import each_engine, folder_of, start_with
from tests.loop.small_run import metrics_of, small_config
from tests.unit.hybrid.made import contrast, rollout, trainer_logprobs

Sections = Mapping[str, Mapping[str, Any]]
BF16: Sections = {"model": {"dtype": "bfloat16"}}


def trained(folder: Path, engine: str, *changes: Sections) -> Path:
    """The folder of a run in bfloat16 that has ended; the model is the same for all in `folder`."""
    model = folder / "model" if (folder / "model").exists() else folder_of(folder / "model")
    sections: dict[str, dict[str, Any]] = small_config(folder, {"trainer": {"lr": 1e-3}})
    for change in (
        {"run": {"steps": 2}, "rollout": {"engine": engine, "max_response_length": 8}},
        *changes,
    ):
        for name, section in change.items():
            sections[name] = {**sections.get(name, {}), **section}
    sections["model"] = {"path": str(model), **BF16["model"]}
    return td.train(td.config_from_dict(sections))


def measured(log_ratio: Tensor, low: float, high: float) -> dict[str, float]:
    """The metrics by plain arithmetic, of log-ratios of the tokens in the loss."""
    ratios = [math.exp(float(d)) for d in log_ratio]
    return {
        "mismatch/kl": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios),
        "mismatch/logprob_diff_mean": float(log_ratio.abs().mean()),
        "mismatch/logprob_diff_max": float(log_ratio.abs().max()),
        "mismatch/ratio_max": max(ratios),
        "mismatch/share_outside": sum(not low <= ratio <= high for ratio in ratios) / len(ratios),
    }


def logged(run: Path, step: int) -> Tensor:
    """Log-ratios of trainer to engine that the rollout log of a step holds, of the responses that were run."""
    rows = [json.loads(line) for line in (run / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()]
    ran = [row for row in rows if not math.isnan(row["logprobs"][0] or math.nan)]
    assert 0 < len(ran) < len(rows), "some responses have advantage 0, and are not measured"
    pairs = [pair for row in ran for pair in zip(row["logprobs"], row["rollout_logprobs"], strict=True)]
    return torch.tensor(pairs, dtype=torch.float64).T[0] - torch.tensor(pairs, dtype=torch.float64).T[1]


@each_engine
def test_the_metrics_of_a_run_are_those_of_its_rollout_log(engine: str, tmp_path: Path) -> None:
    """In the second step, after an update. Log-probs of a step's only update are those of the weights that sampled."""
    bounds = (0.999, 1.001)
    run = trained(tmp_path, engine, {"algorithm": {"correction": "token_mask", "correction_range": list(bounds)}})
    line = metrics_of(run)[1]
    expected = measured(logged(run, 2), *bounds)
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert 0 < expected["mismatch/share_outside"] < 1
    assert 1e-9 < expected["mismatch/kl"] < 1e-3  # rounding, and no more
    assert line["mismatch/staleness_kl"] == 0.0


@each_engine
def test_mismatch_stop_ends_a_run_that_its_remedy_goes_on_with(engine: str, tmp_path: Path) -> None:
    trained(tmp_path, engine, {"run": {"steps": 1}})
    strict: Sections = {"algorithm": {"mismatch_stop": 1e-12}, "run": {"steps": 3, "allow_changes": True}}
    with pytest.raises(TrainingError, match=r"(?s)step 2: .*mismatch/kl is .*raise algorithm\.mismatch_stop"):
        trained(tmp_path, engine, strict)
    run = trained(tmp_path, engine, strict, {"algorithm": {"mismatch_stop": 0.5}})
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3]


@each_engine
def test_of_old_rollouts_mismatch_and_staleness_are_told_apart(engine: str, tmp_path: Path) -> None:
    """Each by plain arithmetic; together they are the ratio that the correction bounds."""
    algorithm = {"old_logprobs": "recompute", "correction": "token_tis", "correction_range": [0.0, 1.5]}
    config = {"algorithm": algorithm, **BF16}
    with start_with(engine, folder_of(tmp_path / "model"), config) as workers:
        rollouts = rollout(workers, temperature=1.0)
        sampling = trainer_logprobs(workers, rollouts)
        with workers.train_phase() as trainer:
            trainer.update(rollouts, contrast(rollouts), sampling)
            old = trainer.old_logprobs(rollouts)
            assert old is not None
            update = trainer.update(rollouts, contrast(rollouts), old, sampling_logprobs=sampling)
    mask = rollouts.response_mask
    mismatch = (sampling - rollouts.rollout_logprobs)[mask].double()
    staleness = (old - sampling)[mask].double()
    expected = measured(mismatch, 0.0, 1.5)
    expected["mismatch/staleness_kl"] = measured(staleness, 0.0, 1.5)["mismatch/kl"]
    assert {name: update.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert 1e-8 < expected["mismatch/kl"] < 1e-2 < expected["mismatch/staleness_kl"]
    weights = td.Correction("token_tis", high=1.5)(old, rollouts.rollout_logprobs, mask)[mask]
    torch.testing.assert_close(weights, (mismatch + staleness).exp().clamp(max=1.5).float(), rtol=1e-5, atol=0)
    assert (weights == 1.5).any()


@each_engine
def test_fault_22_a_cut_distribution_is_compared_with_nothing(engine: str, tmp_path: Path) -> None:
    """vLLM keeps log-probs of what is left; of the embedded engine those of the full distribution are compared."""
    cut = {"rollout": {"top_p": 0.9, "top_k": 5}, **BF16}
    folder = folder_of(tmp_path / "model")
    with start_with(engine, folder, cut) as workers:
        rollouts = rollout(workers, temperature=1.0)
        with workers.train_phase() as trainer:
            update = trainer.update(rollouts, contrast(rollouts), trainer.old_logprobs(rollouts))
    assert update.num_updates == 1
    if engine == "embedded":
        assert not rollouts.cut_logprobs
        assert 0 < update.metrics["mismatch/logprob_diff_max"] < 0.1
        return
    assert rollouts.cut_logprobs
    assert not any(name.startswith("mismatch/") for name in update.metrics)
    for compared in ({"correction": "token_tis"}, {"mismatch_stop": 0.1}):
        with pytest.raises(td.ConfigError, match="vLLM's log-probs are of a cut distribution"):
            start_with(engine, folder, {**cut, "algorithm": compared})
