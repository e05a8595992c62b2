from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config import Config, config_from_dict, leaf_keys, load_config, resolve_config
from tandem.config.checks import updates_per_step
from tandem.config.display import show
from tandem.config.option import choices
from tandem.config.presets import PRESETS
from tandem.config.schema import value_of
from tandem.errors import ConfigError

ENOUGH = ("model.path=Qwen/Qwen3-0.6B", "data.train=train.parquet", "reward.function=exact_match")


def test_the_schema_offers_exactly_the_presets_that_there_are():
    assert choices("algorithm.preset") == tuple(PRESETS)
    for preset in PRESETS.values():
        assert set(preset.settings) <= set(leaf_keys())


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_sets_what_it_says_and_passes_all_checks(name: str):
    config = load_config(None, [*ENOUGH, f"algorithm.preset={name}"])
    for key, value in PRESETS[name].settings.items():
        assert value_of(config, key) == value


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_value_of_a_preset_can_be_overridden_in_the_file(name: str, tmp_path: Path):
    path = tmp_path / "run.yaml"
    for key in PRESETS[name].settings:
        if (name, key) == ("dapo", "rollout.max_response_length"):
            continue  # the default is shorter than the preset's overlong_buffer, which is refused
        section, _, option = key.partition(".")
        path.write_text(f"{section}: {{{option}: {show(value_of(Config(), key))}}}\n")
        config = load_config(path, [*ENOUGH, f"algorithm.preset={name}"])
        assert value_of(config, key) == value_of(Config(), key), key


@pytest.mark.parametrize(
    ("name", "updates", "old_logprobs"),
    [
        ("notes", 4 * 64, "rollout"),
        ("grpo", 1, "update"),
        ("dr_grpo", 1, "update"),
        ("dapo", 16, "rollout"),
        ("gspo", 4, "rollout"),
        ("cispo", 16, "rollout"),
        ("rloo", 2, "rollout"),
        ("reinforce_pp", 1, "rollout"),  # one update, but the KL divergence is in the rewards
        ("ppo", 1, "update"),
    ],
)
def test_a_preset_makes_as_many_updates_per_step_as_its_paper(name: str, updates: int, old_logprobs: str):
    config = resolve_config(load_config(None, [*ENOUGH, f"algorithm.preset={name}"]), num_cpus=1, num_gpus=0)
    assert updates_per_step(config) == updates
    assert config.algorithm.old_logprobs == old_logprobs


def test_preset_notes_is_the_notes_own_setting():
    config = load_config(None, [*ENOUGH, "algorithm.preset=notes"])
    assert (config.rollout.n, config.trainer.update_epochs, config.trainer.mini_batch_responses) == (8, 4, 8)
    assert config.trainer.mini_batch_shuffle == "responses"
    assert config.algorithm.loss_aggregation == "sequence_mean"
    assert config.algorithm.normalize_std == "none"
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.kl_coef) == (0.2, 0.2, 0.0)


def test_the_users_own_keys_win_over_the_preset(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("algorithm:\n  preset: grpo\n  kl_coef: 0.001\nrollout:\n  n: 16\n")
    config = load_config(path, [*ENOUGH, "data.prompts_per_step=8"])
    assert (config.algorithm.kl_coef, config.rollout.n, config.data.prompts_per_step) == (0.001, 16, 8)
    assert config.algorithm.normalize_std == "group"


def test_a_conflict_with_the_preset_names_the_preset():
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*ENOUGH, "algorithm.preset=notes", "rollout.n=3", "data.prompts_per_step=1"])
    (problem,) = caught.value.problems
    assert problem.where == "preset notes"
    assert problem.key == "trainer.mini_batch_responses"


def test_the_users_own_value_is_not_the_presets():
    """A program's values have no line, nor are they of the command line."""
    with pytest.raises(ConfigError) as caught:
        config_from_dict(
            {
                "model": {"path": "Qwen/Qwen3-0.6B"},
                "data": {"train": "train.parquet"},
                "reward": {"function": "exact_match"},
                "algorithm": {"preset": "notes"},
                "rollout": {"n": 1},
            }
        )
    assert [(problem.key, problem.where) for problem in caught.value.problems] == [("rollout.n", None)]


def test_an_unknown_preset_is_an_error():
    with pytest.raises(ConfigError, match=r"did you mean dr_grpo\?"):
        load_config(None, [*ENOUGH, "algorithm.preset=drgrpo"])
    with pytest.raises(ConfigError, match=r"got \"foo\", expected notes \| grpo \| .* \| ppo \| null$"):  # none is near
        load_config(None, [*ENOUGH, "algorithm.preset=foo"])
