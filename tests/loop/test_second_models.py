"""A critic or a reference that is another model than the policy: what does not go with it is told at the start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tandem as td
from tandem.errors import ModelError, TandemError
from tests.loop.small_run import MODEL, small_config
from tests.tiny import tiny_model_folder

CHARACTERS = MODEL["tokenizer"]["characters"]  # 14 tokens with <pad> and <eos>: the policy's embedding has 16 rows
SHORT = {"max_position_embeddings": 8}


def run(folder: Path, second: str, path: Path, **sections: Mapping[str, Any]) -> None:
    """A run of one step with a critic or a reference at `path`."""
    folder.mkdir(exist_ok=True)
    named: dict[str, dict[str, Mapping[str, Any]]] = {
        "critic": {"algorithm": {"advantage": "gae"}, "critic": {"path": str(path)}},
        "reference": {"algorithm": {"kl_coef": 0.1, "reference": str(path)}},
    }
    td.train(td.config_from_dict(small_config(folder, {"run": {"steps": 1}, **named[second], **sections})))


@pytest.mark.parametrize(("second", "key"), [("critic", "critic.path"), ("reference", "algorithm.reference")])
def test_a_model_that_cannot_read_what_the_policy_writes_is_refused(tmp_path: Path, second: str, key: str) -> None:
    """14 rows are enough for the tokenizer, not for the policy, which can draw 16 ids."""
    path = tiny_model_folder(tmp_path / "second", vocab_size=14, characters=CHARACTERS, overrides=SHORT)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        run(tmp_path / "a", second, path)
    for part in ("knows 14 tokens, and the policy can draw 16", "has 8 positions, and sequences have up to 12"):
        assert f"{key}: {str(path)!r} {part}" in str(caught.value)
    assert f"{key}: {str(path)!r} has no weights" in str(caught.value)
    assert not (tmp_path / "a" / "run").exists()


@pytest.mark.parametrize(("second", "key"), [("critic", "critic.path"), ("reference", "algorithm.reference")])
def test_a_model_to_which_ids_mean_other_tokens_is_refused(tmp_path: Path, second: str, key: str) -> None:
    path = tiny_model_folder(tmp_path / "second", vocab_size=16, characters="1023456789+=")
    with pytest.raises(ModelError) as caught:
        run(tmp_path / "a", second, path)
    expected = "has another tokenizer: 2 ids are other tokens, such as 2 is '1' there, and '0' for the policy"
    assert f"{key}: {str(path)!r} {expected}" in str(caught.value)
    assert not (tmp_path / "a" / "run").exists()


def test_a_reference_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tiny_model_folder(tmp_path / "second", "MambaForCausalLM")
    with pytest.raises(ModelError, match=r"algorithm\.reference: MambaForCausalLM cannot be served"):
        run(tmp_path / "a", "reference", path)


@pytest.mark.parametrize("second", ["critic", "reference"])
def test_a_model_with_the_policys_rows_is_fine(tmp_path: Path, second: str) -> None:
    path = tiny_model_folder(tmp_path / "second", vocab_size=16, characters=CHARACTERS)
    run(tmp_path / "a", second, path)
    assert (tmp_path / "a" / "run" / "checkpoints" / "step_000001").exists()


def test_a_reference_is_looked_at_by_hand_started_workers_too(tmp_path: Path) -> None:
    policy = tiny_model_folder(tmp_path / "policy")
    small = tiny_model_folder(tmp_path / "small", vocab_size=102)
    with pytest.raises(ModelError, match=r"algorithm\.reference: .* knows 102 tokens, and the policy can draw 104"):
        td.start(policy, config={"algorithm": {"kl_coef": 0.1, "reference": str(small)}})


def test_a_policy_that_is_nowhere_is_said_once(tmp_path: Path) -> None:
    path = tiny_model_folder(tmp_path / "second", vocab_size=16, characters=CHARACTERS)
    with pytest.raises(TandemError) as caught:
        run(tmp_path / "a", "reference", path, model={**MODEL, "new": None, "path": str(tmp_path / "nowhere")})
    assert str(caught.value).count("does not exist") == 1
