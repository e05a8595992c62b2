from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from tandem.config import Config, leaf_keys
from tandem.config.option import option
from tandem.config.reward import RewardConfig
from tandem.config.rollout import RolloutConfig


def test_every_key_is_listed_once_with_a_meaning_in_one_sentence_or_more():
    keys = leaf_keys()
    assert len(keys) == len(set(keys)) == 117
    assert keys[0] == "run.folder"
    assert keys[-1] == "tracking.rollouts_max"
    for key in keys:
        assert option(key).meaning.endswith("."), key


def test_a_default_config_needs_no_values():
    config = Config()
    assert config.rollout.n == 8
    assert config.trainer.betas == (0.9, 0.999)


def test_sections_are_closed_and_frozen():
    with pytest.raises(ValidationError, match="extra_forbidden"):
        RolloutConfig.model_validate({"m": 8})
    with pytest.raises(ValidationError, match="frozen"):
        RolloutConfig().n = 4  # type: ignore[misc]


@pytest.mark.parametrize("n", ["8", True, 8.0, 0, None])
def test_types_are_strict(n: object):
    with pytest.raises(ValidationError):
        RolloutConfig.model_validate({"n": n})


@pytest.mark.parametrize("penalty", [0, 1e300, 1.1e6])
def test_a_penalty_stays_in_the_range_of_rewards(penalty: float):
    """In float32 an infinite one would make rewards that are not finite."""
    with pytest.raises(ValidationError, match="overlong_penalty"):
        RewardConfig(overlong_penalty=penalty)
    assert RewardConfig(overlong_penalty=1e6).overlong_penalty == 1e6


def test_importing_the_config_imports_no_torch():
    code = "import sys, tandem.config.reference; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("key", "type_text", "range_text", "default"),
    [
        ("rollout.n", "integer", ">= 1", "8"),
        ("rollout.top_k", "integer | null", ">= 1", "null"),
        ("rollout.top_p", "number", "> 0, <= 1", "1.0"),
        ("rollout.stop", "list of texts", "", "[]"),
        ("trainer.betas", "list of 2 numbers", "each >= 0, < 1", "[0.9, 0.999]"),
        ("trainer.micro_batch_tokens", "integer | auto", ">= 1", "auto"),
        ("trainer.lr", "number", "> 0", "1e-6"),
        ("run.seed", "integer", ">= 0, < 2^62", "0"),
        ("cluster.deterministic", "true | false | auto", "", "auto"),
        ("model.tokenizer", "text | {characters: text} | null", "", "null"),
        ("data.train", "text | list of {path: text, weight: number} | null", "", "null"),
        ("tracking.to", "list of tensorboard | wandb | trackio", "", "[]"),
        ("reward.weights", "{name: number}", "", "{}"),
    ],
)
def test_type_range_and_default_are_taken_from_the_schema(key: str, type_text: str, range_text: str, default: str):
    shown = option(key)
    assert (shown.type, shown.range, shown.default) == (type_text, range_text, default)
