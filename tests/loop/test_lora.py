"""Runs that train adapters: they go on to the bit, and what they leave behind can be used in every way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem import config_from_dict, train
from tandem.checkpoint import complete_checkpoints
from tandem.errors import CheckpointError, ModelError
from tandem.export import export
from tests.loop.small_run import MODEL, differences, metrics_of, run_command, small_config, start_command, traces_of
from tests.loop.small_run import write_config as written
from tests.loop.test_learning import learnt, lines_of
from tests.loop.test_resume import kill_when
from tests.tiny import tiny_model_folder, write_jsonl

TOKENS = torch.tensor([[3, 5, 7, 4, 6, 2]])
LORA = {"model": {"lora_rank": 3}}


def run_in(folder: Path, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """A small run of adapters that has ended."""
    folder.mkdir(exist_ok=True)
    return train(config_from_dict(small_config(folder, {**LORA, **(changes or {})})))


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """By plain transformers, or peft."""
    with torch.no_grad():
        return model(TOKENS).logits


def on_a_model(path: Path) -> dict[str, Any]:
    """Adapters on the model in a folder."""
    return {"model": {"path": str(path), "new": None, "tokenizer": None, "lora_rank": 3}}


@pytest.mark.parametrize("base", ["new", "folder"])
def test_an_export_is_merged_or_an_adapter_for_peft(tmp_path: Path, base: str) -> None:
    tiny_model_folder(tmp_path / "model")
    run = run_in(tmp_path, on_a_model(tmp_path / "model") if base == "folder" else None)
    checkpoint = complete_checkpoints(run)[-1]
    merged = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "merged"))
    adapter = export(checkpoint, tmp_path / "adapter", adapter=True)
    described = json.loads((adapter / "adapter_config.json").read_text())
    without = AutoModelForCausalLM.from_pretrained(described["base_model_name_or_path"])
    of_base = logits_of(without)
    adapted = logits_of(PeftModel.from_pretrained(without, adapter))
    assert float((adapted - of_base).abs().max()) > 1e-2, "nothing was trained"
    torch.testing.assert_close(logits_of(merged), adapted, rtol=0, atol=2e-5)
    assert sorted(path.name for path in (tmp_path / "merged").iterdir() if "adapter" in path.name) == []
    half = export(run, tmp_path / "half", dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(half / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    assert not list(tmp_path.rglob("*.partial"))


def test_a_checkpoint_is_small_and_a_run_goes_on_from_it_to_the_bit(tmp_path: Path) -> None:
    """Killed and started again, with a KL term to the base, for which no second model is kept."""
    changes = {**LORA, "algorithm": {"kl_coef": 0.1}, "run": {"steps": 6}}
    log = tmp_path / "log"
    runs = []
    for name in ("never_stopped", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        changes["run"] = {"steps": 6, "folder": str(folder / "run")}
        config = written(folder / "run.yaml", small_config(folder, changes))
        run = folder / "run"
        if name == "killed":
            lines = run / "metrics.jsonl"
            assert kill_when(
                start_command(["train", str(config)], log),
                lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 3,  # noqa: B023 - called in this round
            ), log.read_text()
        assert run_command(["train", str(config)], log) == 0, log.read_text()
        runs.append(run)
    different = differences(traces_of(runs[1]), traces_of(runs[0]))
    assert {Path(name).name for name in different} == {"adapter_config.json", "base.json"}, "they name the base's path"
    assert not (runs[0] / "reference").exists()
    names = {path.name for path in complete_checkpoints(runs[0])[-1].rglob("*.safetensors")}
    assert names == {"adapter_model.safetensors", "model.safetensors"}, "adapters, and moments of these"
    moments = load_file(complete_checkpoints(runs[0])[-1] / "optimizer" / "model.safetensors")
    assert {name.partition(".")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}
    assert all(".lora_A." in name or ".lora_B." in name for name in moments)


def test_evaluate_finds_adapters_in_a_run_and_in_a_checkpoint(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "held_out.jsonl", [{"prompt": "1+2=", "ground_truth": "3"}])
    changes = {**LORA, "evaluation": {"data": str(rows), "every": 0, "n": 8}}
    config = written(tmp_path / "run.yaml", small_config(tmp_path, changes))
    logs = [tmp_path / f"log{number}" for number in range(3)]
    assert run_command(["train", str(config)], logs[0]) == 0, logs[0].read_text()
    assert run_command(["evaluate", str(config)], logs[1]) == 0, logs[1].read_text()
    checkpoint = complete_checkpoints(tmp_path / "run")[-1]
    command = ["evaluate", str(config), f"model.path={checkpoint}", "model.new=null", "model.tokenizer=null"]
    assert run_command([*command, "model.lora_rank=0"], logs[2]) == 0, logs[2].read_text()
    of_run, of_checkpoint = (
        [line for line in log.read_text().splitlines() if "pass@" in line or "reward" in line] for log in logs[1:]
    )
    assert of_run == of_checkpoint
    assert len(of_run) > 2


def test_a_run_that_was_moved_is_exported_with_the_base_beside_it_and_a_damaged_base_is_named(tmp_path: Path) -> None:
    run = run_in(tmp_path, {"run": {"steps": 1, "folder": str(tmp_path / "run")}})
    expected = logits_of(AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "before")))
    moved = run.rename(tmp_path / "moved")
    found = logits_of(AutoModelForCausalLM.from_pretrained(export(moved, tmp_path / "after")))
    assert torch.equal(found, expected)

    file = moved / "base" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError) as caught:
        export(moved, tmp_path / "exported")
    assert f"{complete_checkpoints(moved)[-1] / 'model'} holds an adapter" in str(caught.value)
    assert "partial" not in str(caught.value)
    config = small_config(tmp_path, {"model": {**MODEL, **LORA["model"]}, "run": {"steps": 2, "folder": str(moved)}})
    with pytest.raises(CheckpointError) as caught:
        train(config_from_dict(config))
    assert "their base cannot be read" in str(caught.value)
    assert f"bring it back to {moved / 'base'} as it was" in str(caught.value)


def test_a_run_does_not_go_on_where_adapters_do_not_fit(tmp_path: Path) -> None:
    model = tiny_model_folder(tmp_path / "model")
    config = small_config(tmp_path, {**on_a_model(model), "run": {"steps": 1, "folder": str(tmp_path / "run")}})
    train(config_from_dict(config))
    recorded = (tmp_path / "run" / "config.yaml").read_text()
    config["run"] |= {"steps": 2, "allow_changes": True}
    for change, message in (
        ({"lora_rank": 2}, r"model.lora_rank: 3 -> 2\n  -> set it as it was"),
        ({"lora_alpha": 8}, r"model.lora_alpha: 32 -> 8\n"),
        ({"lora_targets": ["q_proj"]}, r"model.lora_targets: all-linear -> \[q_proj\]\n"),
        ({"lora_rank": 0}, r"model.lora_rank: 3 -> 0\n"),
    ):
        with pytest.raises(CheckpointError, match=message):
            train(config_from_dict({**config, "model": {**config["model"], **change}}))
    for name in ("base.json", "adapter_config.json", "adapter_model.safetensors"):
        file = complete_checkpoints(tmp_path / "run")[-1] / "model" / name
        content = file.read_bytes()
        file.write_bytes(content[:20])
        with pytest.raises(CheckpointError, match="delete this checkpoint folder"):
            train(config_from_dict(config))
        file.write_bytes(content)
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the weights of .* are others"):
        train(config_from_dict(config))
    assert (tmp_path / "run" / "config.yaml").read_text() == recorded, "whatever refused it"
    assert not (tmp_path / "run" / "changes.jsonl").exists()
    with pytest.raises(ModelError, match="no longer the model that it was trained on"):
        export(tmp_path / "run", tmp_path / "exported")
    shutil.rmtree(model)
    with pytest.raises(ModelError, match="the model that it belongs to cannot be read"):
        export(tmp_path / "run", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.slow
def test_adapters_learn_to_repeat_a_letter_on_weights_that_stay_random(tmp_path: Path) -> None:
    """Logits need a base with larger weights than new ones have: the head stays. From one in eight to nearly always."""
    new = {
        "architecture": "Qwen3ForCausalLM",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 16,
        "initializer_range": 0.1,
    }
    run = learnt(tmp_path, {"model": {"new": new, "lora_rank": 8}, "trainer": {"lr": 1e-2}})
    before, steps = lines_of(run)
    assert before["eval/pass@1"] < 0.3
    assert steps[-1]["eval/pass@1"] > 0.8
    assert sum(step["reward/mean"] for step in steps[-5:]) / 5 > 0.8
    exported = load_file(export(run, tmp_path / "exported") / "model.safetensors")
    base = load_file(run / "base" / "model.safetensors")
    trained = {name.split(".")[-2] for name in base if not torch.equal(base[name], exported[name])}
    assert trained == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_adapters_on_another_runs_checkpoint_keep_it_and_a_warm_start_is_the_reference(tmp_path: Path) -> None:
    """Adapters may themselves be a base: they are merged."""
    first = run_in(tmp_path / "first")  # adapters
    answers = write_jsonl(tmp_path / "answers.jsonl", [{"prompt": "1+2=", "answer": "3"}])
    changes = {
        **on_a_model(first),
        "sft": {"train": str(answers), "steps": 2, "batch_size": 1, "lr": 1e-2},
        "algorithm": {"kl_coef": 0.1},
    }
    (tmp_path / "second").mkdir()
    config = small_config(tmp_path / "second", {**changes, "run": {"steps": 1, "folder": str(tmp_path / "second/run")}})
    run = train(config_from_dict(config))
    of_first = logits_of(AutoModelForCausalLM.from_pretrained(export(first, tmp_path / "merged")))
    base = AutoModelForCausalLM.from_pretrained(run / "base")
    torch.testing.assert_close(logits_of(base), of_first, rtol=0, atol=2e-5)
    reference = logits_of(AutoModelForCausalLM.from_pretrained(run / "reference"))
    assert float((reference - of_first).abs().max()) > 1e-2, "the policy after the warm start"
    config["run"]["steps"] = 2
    train(config_from_dict(config))
    kl = [line["policy/kl"] for line in metrics_of(run) if "policy/kl" in line]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 1e-6
