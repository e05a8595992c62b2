"""The commands beside `tandem train`, as a person types them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tandem import cli
from tests.loop.small_run import metrics_of, small_config, write_config
from tests.tiny import write_jsonl


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of `tandem <arguments>`, and all that it prints."""
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main()
    shown = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, shown.out + shown.err


def test_help_is_quick_since_it_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom tandem import cli\n"
        "try:\n    cli.app(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "train" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_train_evaluate_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [{"prompt": f"{n}=", "ground_truth": "1"} for n in range(4)])
    config = small_config(tmp_path, {"evaluation": {"data": str(held_out), "n": 2}, "run": {"steps": 2}})
    file = str(write_config(tmp_path / "small.yaml", config))
    assert run(["evaluate", file], monkeypatch, capsys)[1].count("a new model with random weights") == 2
    assert not (tmp_path / "run").exists(), "evaluating leaves no trace"

    code, shown = run(["train", file], monkeypatch, capsys)
    assert code == 0
    for part in (
        "looking at reward, model and data ...",
        "loading the model ...",
        "evaluation ...",
        "step 2/2",
        "Finished",
    ):
        assert part in shown

    under_way = tmp_path / "run" / "checkpoints" / "step_000003.partial"
    under_way.mkdir()  # of a process that is training
    code, shown = run(["evaluate", file, "evaluation.n=4"], monkeypatch, capsys)
    assert code == 0
    assert "model: " + str(tmp_path / "run" / "checkpoints" / "step_000002") in shown
    assert re.search(r"pass@4: \d\.\d+ ± \d\.\d+\n", shown)
    assert "_stderr" not in shown
    assert under_way.exists()

    code, shown = run(["export", str(tmp_path / "run"), "--to", str(tmp_path / "model")], monkeypatch, capsys)
    assert code == 0
    assert f"AutoModelForCausalLM.from_pretrained({str(tmp_path / 'model')!r})" in shown
    code, shown = run(["export", str(tmp_path / "run"), "--to", str(tmp_path / "model")], monkeypatch, capsys)
    assert code == 1
    assert "exists already" in shown


def test_evaluate_repeats_the_number_of_the_run_and_takes_the_model_that_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [{"prompt": f"{n}=", "ground_truth": "11"} for n in range(9)])
    changes = {"evaluation": {"data": str(held_out), "n": 16, "every": 1}, "checkpoint": {"every": 1, "keep": 9}}
    file = str(write_config(tmp_path / "small.yaml", small_config(tmp_path, changes)))
    assert run(["train", file], monkeypatch, capsys)[0] == 0
    rewards = {line["step"]: f"reward: {line['eval/reward']:.3f}" for line in metrics_of(tmp_path / "run")}
    assert rewards[2] != rewards[4]
    assert rewards[4] in run(["evaluate", file], monkeypatch, capsys)[1]

    second = tmp_path / "run" / "checkpoints" / "step_000002"
    told = ["model.new=null", "model.tokenizer=null", f"model.path={second}"]
    shown = run(["evaluate", file, *told], monkeypatch, capsys)[1]
    assert f"model: {second}" in shown
    assert rewards[2] in shown


def test_evaluate_needs_something_to_evaluate_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = run(["evaluate", str(write_config(tmp_path / "r.yaml", small_config(tmp_path)))], monkeypatch, capsys)
    assert code == 1
    assert "set evaluation.data to a file of held-out prompts" in shown


def test_config_prints_every_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run(["config"], monkeypatch, capsys)
    assert code == 0
    for key in ("run.folder", "reward.max_invalid_share", "trainer.lr_final", "tracking.rollouts_max"):
        assert f"\n  {key} = " in shown


def test_config_prints_one_section(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run(["config", "rollout"], monkeypatch, capsys)
    assert code == 0
    assert shown.startswith("rollout: ")
    assert "trainer" not in shown
    code, shown = run(["config", "roll"], monkeypatch, capsys)
    assert code == 1
    assert "there is no section 'roll'\n  -> the sections are run, model, data," in shown


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], monkeypatch, capsys) == (0, f"tandem {version('tandem-rl')}\n")
