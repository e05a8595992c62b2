"""What a run leaves behind can be used: by transformers, by the next run, and the best of it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem import Prompt, config_from_dict, start_workers, train
from tandem.checkpoint import complete_checkpoints, read_state
from tandem.errors import CheckpointError
from tandem.export import export
from tandem.hybrid.start import resolve_here
from tandem.observe.memory import PeakMemory, bytes_in_use
from tests.loop.small_run import exit_code, metrics_of, small_config, start_function
from tests.tiny import tiny_model_folder, write_jsonl

TOKENS = torch.tensor([[3, 5, 7, 4, 6, 2]])


def run_in(folder: Path, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    return train(config_from_dict(small_config(folder, changes)))


def logits_of(folder: Path) -> torch.Tensor:
    """By plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(TOKENS).logits


def test_an_export_gives_plain_transformers_the_trained_logits(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run_folder")
    exported = export(run, tmp_path / "exported")
    config = resolve_here(config_from_dict(small_config(tmp_path / "run_folder")))
    with start_workers(config) as workers, workers.rollout_phase() as engine:
        prompt = Prompt(tokens=(3, 5, 7), text="")
        rollouts = engine.generate([prompt], n=4, step=0)
    model = AutoModelForCausalLM.from_pretrained(exported)
    for row in range(len(rollouts)):
        response = rollouts.response_tokens[row, : rollouts.response_lengths[row]]
        with torch.no_grad():
            logits = model(torch.cat([torch.tensor(prompt.tokens), response])[None]).logits[0, 2:-1]
        logprobs = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(logprobs, rollouts.rollout_logprobs[row, : len(response)], rtol=0, atol=2e-5)
    first, _ = complete_checkpoints(run)
    earlier = logits_of(export(first, tmp_path / "earlier"))
    assert (earlier - logits_of(exported)).abs().max() > 1e-3, "another step has other weights"
    assert AutoTokenizer.from_pretrained(exported).decode([3, 4]) == "12"
    assert not list(tmp_path.rglob("*.partial"))


def test_an_export_is_the_checkpoints_folder_in_another_dtype(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    trained = complete_checkpoints(run)[-1] / "model"
    files = {path.name: path.read_bytes() for path in trained.iterdir()}
    assert {path.name: path.read_bytes() for path in export(run, tmp_path / "whole").iterdir()} == files
    half = export(run, tmp_path / "half", dtype="bfloat16")
    changed = {path.name for path in half.iterdir() if path.read_bytes() != files[path.name]}
    assert changed == {"config.json", "model.safetensors"}
    assert AutoModelForCausalLM.from_pretrained(half).dtype == torch.bfloat16
    weights, halves = load_file(trained / "model.safetensors"), load_file(half / "model.safetensors")
    assert weights.keys() == halves.keys()
    assert all(torch.equal(halves[name], weight.bfloat16()) for name, weight in weights.items())


def peak_of_export(checkpoint: Path, to: Path, result: Path) -> None:
    """Write how much more memory an export has taken at its highest than the process had before, in bytes."""
    cpu, peak = torch.device("cpu"), PeakMemory(torch.device("cpu"))
    before = bytes_in_use(cpu)
    peak.start()
    export(checkpoint, to, dtype="bfloat16")
    highest = peak.stop()
    assert before is not None
    assert highest is not None
    result.write_text(str(highest - before))


def test_an_export_takes_little_memory(tmp_path: Path) -> None:
    """A few chunks of 16 MB, however large the tensors are."""
    folder = tmp_path / "checkpoint"
    tiny_model_folder(folder / "model")
    (folder / "optimizer").mkdir()
    (folder / "state.json").write_text("{}")
    size = 160_000_000
    file = folder / "model/model.safetensors"
    save_file({name: torch.full((size // 8,), value) for name, value in (("one", 1.0), ("two", 2.0))}, file)
    log = tmp_path / "log"
    process = start_function(peak_of_export, log, folder, tmp_path / "exported", tmp_path / "peak")
    assert exit_code(process) == 0, log.read_text()
    # What it takes is a buffer and what transformers leaves lying about: 45 to 55 MB, whatever the model's size.
    assert int((tmp_path / "peak").read_text()) < size / 2
    assert (tmp_path / "exported" / file.name).stat().st_size == pytest.approx(size / 2, rel=0.01)


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    file = complete_checkpoints(run)[-1] / "model/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"step_000004 cannot be exported: .* is damaged: it has .* bytes"):
        export(run, tmp_path / "exported")
    assert not list(tmp_path.glob("exported*"))


def test_an_export_never_overwrites_and_says_what_it_needs(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match=r"mine exists already\n  -> give a new folder"):
        export(run, tmp_path / "mine")
    with pytest.raises(CheckpointError, match="neither a run with a complete checkpoint nor a checkpoint"):
        export(tmp_path / "mine", tmp_path / "new")
    with pytest.raises(CheckpointError, match="use one of float32, bfloat16"):
        export(run, tmp_path / "new", dtype="int8")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        export(run, tmp_path / "file" / "new")
    assert not (tmp_path / "new").exists()


def test_the_next_run_may_start_from_a_run_or_from_one_of_its_checkpoints(tmp_path: Path) -> None:
    run = run_in(tmp_path / "first")
    earlier, newest = complete_checkpoints(run)
    lines = {
        path.name: metrics_of(run_in(tmp_path / f"from_{path.name}", from_model(path)))[0]
        for path in (run, earlier, newest)
    }
    assert lines["run"] == lines[newest.name]
    assert lines[earlier.name] != lines[newest.name]


def from_model(path: Path) -> dict[str, dict[str, Any]]:
    return {"model": {"path": str(path), "new": None, "tokenizer": None}, "run": {"steps": 1}}


def evaluated(folder: Path, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    folder.mkdir(exist_ok=True)
    held_out = write_jsonl(folder / "held_out.jsonl", [{"prompt": f"{n}=", "ground_truth": str(n)} for n in range(8)])
    return {**changes, "evaluation": {"data": str(held_out), "every": 1, **changes.get("evaluation", {})}}


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    changes = {"run": {"steps": 8}, "checkpoint": {"every": 1, "keep": 1, "keep_best": 1}}
    run = run_in(tmp_path, evaluated(tmp_path, changes))
    scores = {line["step"]: line["eval/pass@1"] for line in metrics_of(run) if line["step"] > 0}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert best not in (7, 8), "the newest would be kept in any case"
    kept = complete_checkpoints(run)
    assert [path.name for path in kept] == [f"step_{step:06d}" for step in sorted({best, 8})]
    assert [read_state(path)["evaluation"]["pass@1"] for path in kept] == [scores[best], scores[8]]


def test_patience_ends_a_run_and_more_of_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        "run": {"steps": 9},
        "reward": {"function": "exact_match"},  # never matches: no evaluation is better than the first
        "evaluation": {"patience": 2},
    }
    run = run_in(tmp_path, evaluated(tmp_path, changes))
    assert "No gain any more: stopped" in capsys.readouterr().out
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2]
    assert complete_checkpoints(run)[-1].name == "step_000002"
    run_in(tmp_path, evaluated(tmp_path, changes))
    assert "No gain any more: stopped" in capsys.readouterr().out
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2], "the same command again changes nothing"
    run_in(tmp_path, evaluated(tmp_path, {**changes, "evaluation": {"patience": 4}}))
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2, 3, 4]
