"""examples/reward_model.py: a sequence classifier judges responses in a worker of its own, a policy learns from it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tandem.config.load import load_config
from tandem.config.reward import RewardConfig
from tandem.errors import RewardError
from tandem.rewards.pool import start_rewards
from tandem.rewards.sample import Sample
from tandem.train import train
from tests.docs.pages import ROOT
from tests.tiny import tiny_model_folder

EXAMPLE = ROOT / "examples" / "reward_model.py"
MEMBERS = runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MEMBERS["make_tiny"](tmp_path_factory.mktemp("reward_model") / "model")


def config_of(model: Path | str, *, memory_gib: float = 4.0) -> RewardConfig:
    options = {"model": str(model), "batch_size": 3, "suffix": "="}
    return RewardConfig(
        function=f"{EXAMPLE}:RewardModel",
        options=options,
        batched=True,
        workers=1,
        memory_gib=memory_gib,
        timeout_s=60,
    )


def test_each_response_gets_the_score_that_the_model_gives_it_alone(model: Path) -> None:
    """In batches of three with padding; on one's own without. Tolerance: rounding in float32."""
    texts = [("07+45=", "052"), ("1+1=", "2"), ("12345+", "="), ("0", "0123456789"), ("1+1=", ""), ("1+1=", "2")]
    with start_rewards(config_of(model)) as pool:
        scores = pool.gather([pool.submit(Sample(response, prompt)) for prompt, response in texts])
    tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval()
    for (prompt, response), score in zip(texts, scores, strict=True):
        tokens = torch.tensor([tokenizer.encode(f"{prompt}{response}=")])
        with torch.no_grad():
            expected = float(classifier(tokens).logits[0, 0])
        assert score.value == pytest.approx(expected, abs=1e-5), score.error
    assert scores[1].value == pytest.approx(scores[5].value, abs=1e-5)
    assert len({round(score.value or 0.0, 3) for score in scores}) == 5


def test_fault_16_a_text_is_read_to_its_end_also_where_that_is_the_padding_token(model: Path, tmp_path: Path) -> None:
    """Tokenizers without a padding token take that which ends a text; it is part of `suffix`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = None
    own = tmp_path / "model"
    AutoModelForSequenceClassification.from_pretrained(model).save_pretrained(own)
    tokenizer.save_pretrained(own)
    texts = [("07+45=", "052"), ("1+1=", "2"), ("12345+", "="), ("0", tokenizer.eos_token)]
    judge = MEMBERS["RewardModel"](str(own), threads=torch.get_num_threads(), suffix=tokenizer.eos_token)
    scores = judge([prompt for prompt, _ in texts], [response for _, response in texts])
    classifier = AutoModelForSequenceClassification.from_pretrained(own).eval()
    for (prompt, response), score in zip(texts, scores, strict=True):
        tokens = torch.tensor([tokenizer.encode(prompt + response + tokenizer.eos_token)])
        classifier.config.pad_token_id = None  # one text, without padding: its last token is the last one
        with torch.no_grad():
            assert score == pytest.approx(float(classifier(tokens).logits[0, 0]), abs=1e-5)


def test_what_is_no_reward_model_is_told_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"there is no reward model '.*nowhere': give the folder of one"):
        start_rewards(config_of(tmp_path / "nowhere"))
    policy = tiny_model_folder(tmp_path / "policy", characters="0123456789+=")
    with pytest.raises(ValueError, match=r"is no reward model: it has 2 outputs, .* lacks: score.weight"):
        MEMBERS["RewardModel"](str(policy), threads=torch.get_num_threads())
    with pytest.raises(RewardError, match=r"reward\.memory_gib may be too small"):
        start_rewards(config_of(model, memory_gib=0.1))


def test_the_run_of_the_example_begins(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first two steps: every response has a score, groups have contrast, and the policy is updated."""
    monkeypatch.chdir(ROOT)
    overrides = [f"reward.options.model={model}", f"run.folder={tmp_path / 'run'}", "run.steps=2"]
    folder = train(load_config(EXAMPLE.with_suffix(".yaml"), overrides))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["reward/invalid"] == 0
        assert line["reward/std"] > 0.1
        assert line["rollout/groups_without_contrast"] == 0
        assert line["policy/grad_norm"] > 0
