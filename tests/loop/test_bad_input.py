"""What bad input gets: a message that names the place and the remedy, before any weights are read.

The model's weight file is a torn one: whatever read it would fail with another message than the expected one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem import cli
from tests.loop.small_run import small_config, write_config
from tests.tiny import addition_rows, tiny_model_folder, write_jsonl, write_verl_parquet

Config = dict[str, Any]
Spoil = Callable[[Path, Config], None]

CALLS = "def score(response, ground_truth):\n    return 1.0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a model with torn weights, data in verl's schema, a reward."""
    monkeypatch.chdir(tmp_path)
    tear(tiny_model_folder(tmp_path / "model"))
    write_verl_parquet(tmp_path / "train.parquet", addition_rows(8))
    return tmp_path


def tear(model: Path) -> Path:
    """Leave the header's length and nothing else of the weights."""
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:8])
    return model


def config_in(folder: Path) -> Config:
    config = small_config(folder)
    (folder / "reward.py").write_text(CALLS)
    config["model"] = {"path": "model"}
    config["data"] = {"train": "train.parquet", "prompts_per_step": 4, "max_prompt_length": 64}
    config["reward"]["function"] = "reward.py:score"
    config["run"]["folder"] = "run"
    return config


def message_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `tandem train` says, where it must end with 1."""
    monkeypatch.setattr(sys, "argv", ["tandem", "train", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    shown = capsys.readouterr()
    assert caught.value.code == 1, shown
    assert shown.err.startswith("tandem: "), shown.err
    return shown.err


def no_train_file(folder: Path, config: Config) -> None:
    config["data"]["train"] = "data/nothing.parquet"


def train_is_a_folder(folder: Path, config: Config) -> None:
    (folder / "some.parquet").mkdir()
    config["data"]["train"] = "some.parquet"


def not_a_parquet_file(folder: Path, config: Config) -> None:
    (folder / "train.parquet").write_text("prompt,answer\n")


def another_format(folder: Path, config: Config) -> None:
    (folder / "train.csv").write_text("prompt,answer\n")
    config["data"]["train"] = "train.csv"


def a_broken_line(folder: Path, config: Config) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "1", "answer": "2"}\n{"prompt": \n')
    config["data"]["train"] = "train.jsonl"


def no_rows(folder: Path, config: Config) -> None:
    (folder / "train.jsonl").write_text("")
    config["data"]["train"] = "train.jsonl"


def no_prompt_column(folder: Path, config: Config) -> None:
    write_jsonl(folder / "train.jsonl", [{"question": "1+1=", "answer": "2"}])
    config["data"]["train"] = "train.jsonl"


def no_truth_column(folder: Path, config: Config) -> None:
    config["data"]["truth_key"] = "solution"


def a_prompt_of_another_type(folder: Path, config: Config) -> None:
    write_jsonl(folder / "train.jsonl", [{"prompt": 12, "answer": "2"}])
    config["data"]["train"] = "train.jsonl"


def prompts_over_the_limit_are_errors(folder: Path, config: Config) -> None:
    config["data"] |= {"max_prompt_length": 5, "over_length": "error"}


def all_prompts_over_the_limit(folder: Path, config: Config) -> None:
    config["data"]["max_prompt_length"] = 5


def fewer_prompts_than_a_step_needs(folder: Path, config: Config) -> None:
    config["data"]["prompts_per_step"] = 9


def no_chat_template(folder: Path, config: Config) -> None:
    tear(tiny_model_folder(folder / "plain", chat_template=None))
    config["model"]["path"] = "plain"


def no_held_out_file(folder: Path, config: Config) -> None:
    config["evaluation"] = {"data": {"sums": "nowhere.jsonl"}}


def no_warm_start_file(folder: Path, config: Config) -> None:
    config["sft"] = {"train": "answers.jsonl", "steps": 3}


def no_model_folder(folder: Path, config: Config) -> None:
    config["model"]["path"] = "./modle"


def no_eos_token(folder: Path, config: Config) -> None:
    spoil_json(folder / "model" / "tokenizer_config.json", eos_token=None)
    spoil_json(folder / "model" / "generation_config.json", eos_token_id=None)
    spoil_json(folder / "model" / "config.json", eos_token_id=None)


def a_tokenizer_larger_than_the_embedding(folder: Path, config: Config) -> None:
    spoil_json(folder / "model" / "config.json", vocab_size=40)


def pickled_weights_only(folder: Path, config: Config) -> None:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")


def code_of_its_own(folder: Path, config: Config) -> None:
    spoil_json(folder / "model" / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.MyConfig"})
    (folder / "model" / "mine.py").write_text("raise SystemExit('the code of the model was run')\n")


def a_recurrent_architecture(folder: Path, config: Config) -> None:
    tear(tiny_model_folder(folder / "recurrent", "MambaForCausalLM"))
    config["model"]["path"] = "recurrent"


def a_context_too_short(folder: Path, config: Config) -> None:
    config["rollout"]["max_response_length"] = 1000


def no_reference(folder: Path, config: Config) -> None:
    config["algorithm"] = {"kl_coef": 0.1, "reference": "./nowhere"}


def no_reward_file(folder: Path, config: Config) -> None:
    config["reward"]["function"] = "rewards/mine.py:score"


def no_such_reward(folder: Path, config: Config) -> None:
    config["reward"]["function"] = "reward.py:scroe"


def no_reward_for_a_source(folder: Path, config: Config) -> None:
    config["reward"]["function"] = {"sums": "reward.py:score"}


def a_reward_with_a_syntax_error(folder: Path, config: Config) -> None:
    (folder / "reward.py").write_text("def score(response, ground_truth)\n    return 1.0\n")


def a_reward_that_asks_for_more(folder: Path, config: Config) -> None:
    (folder / "reward.py").write_text("def score(response, ground_truth, temperature):\n    return 1.0\n")


def a_group_of_one(folder: Path, config: Config) -> None:
    config["rollout"]["n"] = 1


def a_mini_batch_that_does_not_divide(folder: Path, config: Config) -> None:
    config["trainer"]["mini_batch_responses"] = 5


def a_key_of_verl(folder: Path, config: Config) -> None:
    config["data"]["train_batch_size"] = 4


def a_missing_tracker(folder: Path, config: Config) -> None:
    config["tracking"] = {"to": ["wandb"]}


def a_file_in_place_of_the_run_folder(folder: Path, config: Config) -> None:
    (folder / "run").write_text("")


def a_config_that_is_not_a_runs(folder: Path, config: Config) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("mine: true\n")


def spoil_json(file: Path, **fields: object) -> None:
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**values, **fields}))


# What is spoilt -> what the message must have
CASES: dict[Spoil, tuple[str, ...]] = {
    no_train_file: ("data/nothing.parquet", "no such file", "{folder}"),
    train_is_a_folder: ("some.parquet",),
    not_a_parquet_file: ("train.parquet", "parquet"),
    another_format: ("train.csv", "parquet", "jsonl"),
    a_broken_line: ("train.jsonl", "2"),
    no_rows: ("train.jsonl", "no row"),
    no_prompt_column: ("train.jsonl", "'prompt'", "question, answer", "data.prompt_key"),
    no_truth_column: ("train.parquet", "solution", "reward_model", "data.truth_key"),
    a_prompt_of_another_type: ("train.jsonl", "int", "text"),
    prompts_over_the_limit_are_errors: ("train.parquet", "data.max_prompt_length=5", "data.over_length"),
    all_prompts_over_the_limit: ("train.parquet", "data.max_prompt_length"),
    fewer_prompts_than_a_step_needs: ("data.prompts_per_step=9", "8"),
    no_chat_template: ("chat template", "data.chat_template"),
    no_held_out_file: ("nowhere.jsonl", "no such file", "{folder}"),
    no_warm_start_file: ("answers.jsonl", "no such file", "{folder}"),
    no_model_folder: ("model.path", "./modle", "{folder}"),
    no_eos_token: ("EOS", "eos_token"),
    a_tokenizer_larger_than_the_embedding: ("40", "embedding"),
    pickled_weights_only: ("pytorch_model.bin", "save_pretrained"),
    code_of_its_own: ("model.trust_remote_code=true",),
    a_recurrent_architecture: ("Mamba",),
    a_context_too_short: ("rollout.max_response_length=1000", "512"),
    no_reference: ("algorithm.reference", "./nowhere"),
    no_reward_file: ("rewards/mine.py", "{folder}"),
    no_such_reward: ("scroe", "score", "reward.py"),
    no_reward_for_a_source: (
        "data_source 'addition'",
        "one for 'sums', which does not occur",
        "the data have 'addition'",
    ),
    a_reward_with_a_syntax_error: ("reward.py", "line 1"),
    a_reward_that_asks_for_more: ("temperature", "ground_truth", "extra_info"),
    a_group_of_one: ("rollout.n", "2"),
    a_mini_batch_that_does_not_divide: ("trainer.mini_batch_responses", "is 5", "16 responses"),
    a_key_of_verl: ("data.train_batch_size", "data.prompts_per_step"),
    a_missing_tracker: ("tracking.to", "wandb"),
    a_file_in_place_of_the_run_folder: ("run",),
    a_config_that_is_not_a_runs: ("run/config.yaml", "another run.folder"),
}


@pytest.mark.parametrize("spoil", CASES, ids=lambda spoil: spoil.__name__)
def test_bad_input_gets_a_message_with_the_place_and_a_remedy(
    folder: Path, spoil: Spoil, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_in(folder)
    spoil(folder, config)
    message = message_of([str(write_config(folder / "run.yaml", config))], monkeypatch, capsys)
    for part in CASES[spoil]:
        assert part.format(folder=folder) in message
    assert "->" in message, "there is no remedy"
    assert "weights" not in message or spoil is pickled_weights_only


def test_the_torn_weights_are_noticed_when_nothing_else_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = message_of([str(write_config(folder / "run.yaml", config_in(folder)))], monkeypatch, capsys)
    assert f"the weights of '{folder / 'model'}' cannot be loaded" in message


def test_fault_44_everything_that_is_wrong_in_the_config_is_told_at_once_with_its_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_in(folder)
    config["rollout"] = {"n": "many", "temprature": 0.7, "max_response_length": -1}
    config["trainer"] = {"lr": 0, "mini_batch_responses": 7}
    file = write_config(folder / "run.yaml", config)
    lines = file.read_text().splitlines()
    message = message_of([str(file), "algorithm.clip_lo=0.1"], monkeypatch, capsys)
    for key in ("rollout.n", "rollout.temprature", "rollout.max_response_length", "trainer.lr"):
        name = key.split(".")[1]
        (number,) = (index for index, line in enumerate(lines, start=1) if line.strip().startswith(f"{name}:"))
        assert f"run.yaml:{number}: {key}" in message
    assert "rollout.temperature" in message
    assert "command line: algorithm.clip_lo" in message
    assert "algorithm.clip_low" in message


def test_data_reward_and_model_are_looked_at_in_one_go(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_in(folder)
    for spoil in (no_train_file, no_held_out_file, no_warm_start_file, no_reward_file, no_model_folder, no_reference):
        spoil(folder, config)
    message = message_of([str(write_config(folder / "run.yaml", config))], monkeypatch, capsys)
    for part in ("nothing.parquet", "nowhere.jsonl", "answers.jsonl", "rewards/mine.py", "./modle", "./nowhere"):
        assert part in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_fault_37_a_file_without_read_permission(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.parquet").chmod(0)
    message = message_of([str(write_config(folder / "run.yaml", config_in(folder)))], monkeypatch, capsys)
    assert "train.parquet" in message
    assert "Permission denied" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [(None, ("nothing.yaml", "{folder}")), ("run: [1\n", ("nothing.yaml:2",)), ("- 1\n", ("nothing.yaml",))],
    ids=["missing", "malformed", "no mapping"],
)
def test_a_config_file_that_is_none(
    folder: Path,
    text: str | None,
    parts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        (folder / "nothing.yaml").write_text(text)
    message = message_of(["nothing.yaml"], monkeypatch, capsys)
    for part in parts:
        assert part.format(folder=folder) in message


def test_a_path_that_may_be_a_hub_name_is_told_to_be_no_folder_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = config_in(folder)
    config["model"]["path"] = "runs/nothing"
    message = message_of([str(write_config(folder / "run.yaml", config))], monkeypatch, capsys)
    assert f"'runs/nothing' is no folder in {folder}, and as a name on the hub it fails" in message
