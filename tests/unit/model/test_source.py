"""Where a model comes from: folder, run, checkpoint, hub name; and what is no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.model.hf import read_config
from tandem.model.source import check_hub_name, resolve_model_path, weights_folder, weights_problems
from tandem.model.tokenizer import load_tokenizer


def _model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_hugging_face_folder_is_itself(tmp_path: Path) -> None:
    folder = _model(tmp_path / "model")
    assert resolve_model_path(folder) == folder
    assert resolve_model_path(str(folder)) == folder


def test_a_checkpoint_means_its_weights(tmp_path: Path) -> None:
    weights = _model(tmp_path / "step_000020" / "model")
    assert resolve_model_path(tmp_path / "step_000020") == weights


def test_a_run_means_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    _model(checkpoints / "step_000020" / "model")
    newest = _model(checkpoints / "step_000100" / "model")
    _model(checkpoints / "step_000120.unfinished" / "model")
    assert resolve_model_path(tmp_path / "run") == newest


def test_a_run_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ModelError, match="no complete checkpoint"):
        resolve_model_path(tmp_path)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_a_hub_name_is_returned_as_it_is(name: str) -> None:
    assert resolve_model_path(name) == name


@pytest.mark.parametrize("name", ["work/nope", "nope"])
def test_a_name_that_the_hub_cannot_tell_of_is_no_folder_in_the_first_place(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        check_hub_name(name, "model.tokenizer")
    start = f"model.tokenizer: {name!r} is no folder in {Path.cwd()}, and as a name on the hub it fails: the hub cannot"
    assert error.value.message.startswith(start)
    for load in (read_config, load_tokenizer):
        with pytest.raises(ModelError, match=f"^model.path: {name!r} is no folder in "):
            load(ModelConfig(path=name))


def test_a_model_that_was_loaded_before_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = _model(tmp_path / "models--org--known" / "snapshots" / ("0" * 40))
    (tmp_path / "models--org--known" / "refs").mkdir()
    (tmp_path / "models--org--known" / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    check_hub_name("org/known")
    assert weights_folder("org/known") == snapshot
    assert weights_folder(str(snapshot)) == snapshot
    with pytest.raises(OSError, match="cached snapshot"):
        weights_folder("org/unknown")


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "a/b/c", "~/missing-model"])
def test_a_path_that_does_not_exist_is_no_hub_name(path: str) -> None:
    with pytest.raises(ModelError, match=r"model\.path: .* does not exist"):
        resolve_model_path(path)


def test_the_message_names_the_key_that_gave_the_path() -> None:
    with pytest.raises(ModelError, match=r"^model\.tokenizer: "):
        resolve_model_path("/no/such/folder", key="model.tokenizer")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "merge it"),
        ("model.Q4.gguf", "convert it"),
        ("notes.txt", r"has no config\.json; it holds notes\.txt"),
    ],
)
def test_a_folder_without_a_model_says_what_it_holds(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ModelError, match=message):
        resolve_model_path(tmp_path)


@pytest.mark.parametrize(("file", "message"), [("model.gguf", "convert it"), ("model.safetensors", "give the folder")])
def test_a_file_is_no_folder(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ModelError, match=message):
        resolve_model_path(tmp_path / file)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], "pickle only"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"], "pickle only"),
        (["weights.gguf"], "GGUF only"),
        ([], "no weights"),
    ],
)
def test_only_safetensors_are_weights(tmp_path: Path, files: list[str], message: str) -> None:
    for file in files:
        (tmp_path / file).touch()
    (problem,) = weights_problems(tmp_path)
    assert message in str(problem)
    assert problem.remedy
    (tmp_path / "model.safetensors").touch()
    assert weights_problems(tmp_path) == []
