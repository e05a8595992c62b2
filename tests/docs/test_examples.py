"""The configs in examples/ load, and that of the notes runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.config.load import load_config
from tandem.hybrid.start import resolve_here
from tandem.train import train
from tests.docs.pages import ROOT
from tests.tiny import addition_rows, tiny_model_folder, write_verl_parquet

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str) + len(solution_str) % 3
"""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_config_loads_and_names_what_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    resolve_here(config)
    ours = [name for name in (config.data.train, config.evaluation.data, config.reward.function) if name is not None]
    for name in map(str, ours):
        file = name.partition(":")[0]
        assert not file.startswith("examples/") or Path(file).is_file()


def test_the_setting_of_the_notes_runs_on_a_tiny_qwen3(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(REWARD)
    overrides = {
        "model.path": tiny_model_folder(tmp_path / "tiny", "Qwen3ForCausalLM"),
        "data.train": write_verl_parquet(tmp_path / "train.parquet", addition_rows(8)),
        "data.prompts_per_step": 2,
        "data.max_prompt_length": 100,
        "rollout.max_response_length": 4,
        "reward.function": f"{tmp_path / 'my_reward.py'}:compute_score",
        "run.steps": 1,
        "run.folder": tmp_path / "run",
        "cluster.threads": 1,
    }
    config = load_config(ROOT / "examples" / "notes.yaml", [f"{key}={value}" for key, value in overrides.items()])
    folder = train(resolve_here(config))
    (step,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    responses = [json.loads(line) for line in (folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert len(responses) == 2 * 8
    assert all(response["prompt"].endswith("assistant: (no thinking) ") for response in responses)
    assert config.algorithm.loss_aggregation == "sequence_mean"
    assert step["reward/std"] > 0
    assert step["policy/ratio_max"] > 1.0  # from the second mini-batch on, the policy is not the one that sampled
    groups = [[response["advantage"] for response in responses if response["group"] == group] for group in (0, 1)]
    assert [sum(group) for group in groups] == pytest.approx([0.0, 0.0], abs=1e-5)
