from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config import Config, config_from_dict, load_config, resolve_config, to_yaml
from tandem.errors import ConfigError

ENOUGH = ("model.path=Qwen/Qwen3-0.6B", "data.train=train.parquet", "reward.function=exact_match")


def problems_of(text: str, *overrides: str, folder: Path) -> list[str]:
    """The messages of a config that is at fault, with the file's name in place of its path."""
    path = folder / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [str(problem).replace(str(path), "run.yaml") for problem in caught.value.problems]


def test_the_file_is_above_the_defaults_and_the_command_line_above_the_file(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("rollout:\n  n: 4\n  top_k:\ntrainer:\n  lr: 1e-5\nevaluation:\n")
    overrides = [*ENOUGH, "rollout.n=2", "rollout.n=16", "trainer.betas=[0.9, 0.95]"]
    config = load_config(path, overrides)
    assert config == load_config(str(path), overrides)
    assert config.rollout.n == 16
    assert config.trainer.lr == 1e-5
    assert config.trainer.betas == (0.9, 0.95)
    assert config.rollout.max_response_length == 1024


def test_a_mapping_can_be_given_whole_or_key_by_key():
    config = load_config(
        None,
        [
            *ENOUGH[1:],
            "model={new: {architecture: Qwen3ForCausalLM, hidden_size: 64}, tokenizer: small}",
            "model.new.hidden_size=32",
            "model.new.num_hidden_layers=2",
            "rollout={n: 4}",
        ],
    )
    assert config.model.new == {"architecture": "Qwen3ForCausalLM", "hidden_size": 32, "num_hidden_layers": 2}
    assert config.model.tokenizer == "small"
    assert config.rollout.n == 4


def test_fault_44_all_problems_of_all_kinds_are_reported_at_once_with_place_value_and_remedy(tmp_path: Path):
    text = """\
run:
  steps: 1_000
model:
  pth: Qwen/Qwen3-0.6B
  dtype: float16
data:
  train: train.parquet
rollout:
  n: eight
  temperature: 0
reward:
  function: exact_match
  timeout_s: -1
algorithm:
  kl_estimator: k1
trainer:
  mini_batch_responses: 24
  update_epochs: 2
"""
    overrides = ["rollout.n=4", "sft.steps=5", "trainer.lr=fast", "algorithm.old_logprobs=update", "nonsense"]
    assert problems_of(text, *overrides, folder=tmp_path) == [
        'run.yaml:2: run.steps: got "1_000", expected integer | null (>= 1)\n      -> write 1000',
        "run.yaml:4: model.pth: there is no such key\n      -> did you mean model.path?",
        'run.yaml:5: model.dtype: got "float16", expected auto | float32 | bfloat16\n'
        "      -> write bfloat16 or float32; float16 would need loss scaling",
        "run.yaml:10: rollout.temperature: got 0, expected number (> 0)\n"
        "      -> GRPO learns from responses that differ: sample at 1.0; evaluation.temperature may be 0",
        "run.yaml:13: reward.timeout_s: got -1, expected number (> 0)",
        "run.yaml:15: algorithm.kl_estimator: has no effect: algorithm.kl_coef is 0, so there is no reference\n"
        "      -> set algorithm.kl_coef above 0, or leave it out",
        "run.yaml:17: trainer.mini_batch_responses: is 24, which does not divide a step's 256 responses "
        "(64 prompts x 4)\n      -> the nearest that do are 16 and 32",
        "command line: nonsense: is no option: expected section.key=value\n      -> write it like rollout.n=8",
        'command line: trainer.lr: got "fast", expected number (> 0)',
        "command line: sft.train: is missing, although sft.steps is 5\n"
        "      -> give a file of prompts with answers, or set sft.steps=0",
        "command line: algorithm.old_logprobs: is update, which needs one update per step, but a step has 22\n"
        "      -> set algorithm.old_logprobs=recompute, or auto",
    ]


def test_a_check_that_rests_on_a_value_that_could_not_be_read_is_left_out(tmp_path: Path):
    text = "rollout:\n  n: eight\ntrainer:\n  mini_batch_responses: 7\n"
    assert problems_of(text, *ENOUGH, folder=tmp_path) == [
        'run.yaml:2: rollout.n: got "eight", expected integer (>= 1)'
    ]


def test_an_unreadable_file_says_nothing_about_what_is_missing(tmp_path: Path):
    (problem,) = problems_of("rollout: {n: 4", folder=tmp_path)
    assert problem.startswith("run.yaml:1: YAML: cannot be read")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.n=", "rollout.n: has no value"),
        ("rollout.n", "rollout.n: is no option: expected section.key=value"),
        ("rollout..n=4", "rollout..n=4: is no option"),
        ("rollout.n.x=4", "rollout.n: got {x: 4}, expected integer"),
        ("rollout=4", "rollout: got 4, expected a section"),
        ("rollout.stop=[a", "rollout.stop: cannot be read"),
        ("seed=3", "seed: there is no such key\n      -> did you mean run.seed?"),
        ("trainer.learning_rate=3", "trainer.learning_rate: there is no such key\n      -> did you mean trainer.lr?"),
        ("rollouts={n: 3}", "rollouts: there is no such key\n      -> did you mean the section rollout?"),
        ("run.zzzzzz=3", "run.zzzzzz: there is no such key\n      -> run takes folder, seed, steps, allow_changes"),
        ("rollout.stop=END", 'rollout.stop: got "END", expected list of texts\n      -> write a list: ["END"]'),
        ("data.shuffle=no", 'data.shuffle: got "no", expected true | false\n      -> write false, without quotes'),
        ("rollout.n=8.0", "rollout.n: got 8.0, expected integer (>= 1)\n      -> write 8"),
        (
            "rollout.top_k=-1",
            "rollout.top_k: got -1, expected integer | null (>= 1)\n      -> write null for no filter",
        ),
        ("rollout.top_k=None", 'rollout.top_k: got "None", expected integer | null (>= 1)\n      -> write null'),
        (
            "rollout.n=null",
            "rollout.n: got null, expected integer (>= 1)\n      -> leave the key out for the default, 8",
        ),
        ("trainer.lr=.nan", "trainer.lr: got .nan, expected number (> 0)"),
        ("data.prompt_key=7", 'data.prompt_key: got 7, expected text\n      -> put it in quotes: "7"'),
        (
            "model.tokenizer={characters: 0123}",
            "model.tokenizer: got {characters: 123}, expected text | {characters: text} | null\n"
            '      -> write {characters: "0123"}, with the characters in quotes',
        ),
        ("algorithm.loss_aggregation=token-mean", 'algorithm.loss_aggregation: got "token-mean"'),
    ],
)
def test_a_bad_override_gets_its_message_and_remedy(override: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*ENOUGH, override])
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"command line: {message}")


def test_a_key_inside_of_a_plain_value_of_the_file_cannot_be_set(tmp_path: Path):
    (problem,) = problems_of("evaluation:\n  data: x.parquet\n", *ENOUGH, "evaluation.data.y=z", folder=tmp_path)
    assert problem.startswith("command line: evaluation.data.y: cannot be set: evaluation.data is no mapping")


def test_a_dotted_key_in_yaml_is_answered_with_its_nested_form(tmp_path: Path):
    (problem,) = problems_of("rollout.n: 4\n", *ENOUGH, folder=tmp_path)
    assert problem == "run.yaml:1: rollout.n: there is no such key\n      -> in YAML, write `n: 4` under `rollout:`"


def test_what_a_run_cannot_do_without_is_asked_for_where_it_is_needed():
    with pytest.raises(ConfigError) as caught:
        load_config(None)
    assert [problem.key for problem in caught.value.problems] == ["model.path", "data.train", "reward.function"]
    assert load_config(None, ["model.path=x"], need_data=False, need_reward=False).model.path == "x"


def test_a_dict_is_checked_like_a_file():
    values = {"model": {"path": Path("folder")}, "rollout": {"stop": ("a", "b")}}
    config = config_from_dict(values, need_data=False, need_reward=False)
    assert config.model.path == "folder"
    assert config.rollout.stop == ("a", "b")
    with pytest.raises(ConfigError, match=r"did you mean rollout\.temperature"):
        config_from_dict({**values, "rollout": {"temprature": 1.0}}, need_data=False, need_reward=False)


def test_a_config_survives_writing_and_reading(tmp_path: Path):
    config = load_config(
        None,
        [
            *ENOUGH[2:],
            "algorithm.preset=grpo",
            "data.train=[{path: a b.parquet}, {path: b, weight: 2}]",
            "model.new={architecture: Qwen3ForCausalLM, rope: {theta: 1e6}, sizes: [1, {a: null}]}",
            'model.tokenizer={characters: "0123 \\n"}',
            'rollout.stop=["yes", "1e-5", "\\n", "a: b"]',
            "trainer.activation_checkpointing=true",
            "evaluation.data={sums: sums.parquet}",
            "data.system_prompt=Answer: a number # only",
        ],
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config
    assert list(Config.model_fields) == [line[:-1] for line in to_yaml(config).splitlines() if line[:1].strip()]


def test_a_model_chosen_on_the_command_line_takes_the_place_of_the_files(tmp_path: Path):
    path = tmp_path / "run.yaml"
    new = '{architecture: Qwen3ForCausalLM}, tokenizer: {characters: "01"}'
    path.write_text(f"model: {{new: {new}, dtype: float32}}\n")
    config = load_config(path, ENOUGH)
    assert (config.model.path, config.model.new, config.model.tokenizer) == ("Qwen/Qwen3-0.6B", None, None)
    assert config.model.dtype == "float32"
    assert load_config(path, [*ENOUGH, "model.tokenizer=other"]).model.tokenizer == "other"

    path.write_text("model: {path: old, tokenizer: other}\n")
    config = load_config(path, [*ENOUGH[1:], "model.new.architecture=Qwen3ForCausalLM"])
    assert (config.model.path, config.model.tokenizer) == (None, "other")

    path.write_text(f"model: {{path: old, new: {new}}}\n")
    problem = "run.yaml:1: model.new: is given, and model.path too\n      -> keep one: load a model, or build one"
    assert problems_of(path.read_text(), *ENOUGH[1:], folder=tmp_path) == [problem]


def test_a_name_with_an_underscore_in_place_of_the_dot_is_that_key():
    with pytest.raises(ConfigError, match=r"data_epochs: there is no such key\n.*did you mean data\.epochs\?$"):
        load_config(None, [*ENOUGH, "data_epochs=2"])


def test_without_data_a_loop_of_the_users_own_says_what_a_step_is():
    values = {"trainer": {"mini_batch_responses": 12}, "algorithm": {"old_logprobs": "update"}, "rollout": {"n": 1}}
    model = {"model": {"path": "Qwen/Qwen3-0.6B"}}
    config = config_from_dict({**values, **model}, need_data=False, need_reward=False)
    assert config.trainer.mini_batch_responses == 12
    assert resolve_config(config, num_cpus=1, num_gpus=0).rollout.n == 1


@pytest.mark.parametrize("key", ["reward.options", "data.chat_template_options", "model.new"])
def test_free_options_hold_finite_numbers(key: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=rf"{key}: holds \.inf or \.nan"):
        load_config(None, [*ENOUGH[key == "model.new" :], f"{key}={{architecture: x, k: [{{a: .nan}}]}}"])


def test_names_that_are_numbers_are_texts_in_a_dict_as_in_a_file():
    values = {"model": {"path": "policy"}, "rollout": {"engine": "vllm", "vllm_options": {1: 2}}}
    config = config_from_dict(values, need_data=False, need_reward=False)
    assert config.rollout.vllm_options == {"1": 2}
    read = load_config(None, [*ENOUGH, "rollout.engine=vllm", "rollout.vllm_options={1: 2}"])
    assert read.rollout.vllm_options == config.rollout.vllm_options
