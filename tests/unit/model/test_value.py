"""Value models: the values are transformers' own, and what is saved is a folder of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.model.file_names import FileNames
from tandem.model.hf import load_model, read_config, save_model
from tandem.model.precision import head_parameters
from tandem.model.shards import Shard
from tandem.model.skeleton import materialise
from tandem.model.value import (
    HEAD,
    check_value_class,
    check_value_model,
    read_value_weights,
    take_body,
    value_skeleton,
)
from tandem.trainer.critic import Critic, batch_values
from tandem.trainer.packing import PackingOptions
from tests.tiny import ARCHITECTURES, tiny_model_folder, tiny_tokenizer
from tests.unit.trainer.made import make_rollouts

CPU = torch.device("cpu")
PACKED = PackingOptions("shared_prefix", 30)


def shards_of(model: PreTrainedModel) -> dict[str, Shard]:
    return {name: Shard.whole(parameter) for name, parameter in model.named_parameters()}


def with_body_of(folder: Path) -> PreTrainedModel:
    """The value model that a policy becomes."""
    policy = load_model(ModelConfig(path=str(folder)), device=CPU, dtype=torch.float32)
    model = value_skeleton(policy.config)
    materialise(model, CPU)
    take_body(model, shards_of(model), policy, shards_of(policy))
    return model


def read_back(folder: Path) -> PreTrainedModel:
    source = ModelConfig(path=str(folder))
    model = value_skeleton(read_config(source))
    names = FileNames(model)
    materialise(model, CPU)
    read_value_weights(source, model, shards_of(model), names=names)
    return model


def draw_head(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.get_parameter(HEAD).normal_(generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_are_those_of_transformers_for_all_that_comes_before_a_token(tmp_path: Path, architecture: str) -> None:
    """Values 0 at first; then, with a head and through files, those of a whole pass for each token on its own."""
    rollouts = make_rollouts(prompt_lengths=(5, 2), response_lengths=((3, 1), (4, 2)))
    model = with_body_of(tiny_model_folder(tmp_path / "policy", architecture))
    assert not batch_values(Critic(model), rollouts, PACKED).any()
    assert head_parameters(model) == {model.get_parameter(HEAD)}
    draw_head(model)
    values = batch_values(Critic(model), rollouts, PACKED)
    save_model(model, tmp_path / "critic", tokenizer=tiny_tokenizer())
    assert torch.equal(batch_values(Critic(read_back(tmp_path / "critic")), rollouts, PACKED), values)

    plain, loading = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "critic", attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    expected = torch.zeros_like(values)
    for row in range(len(rollouts)):
        sequence = list(rollouts.prompt_of(row).tokens)
        for column in range(int(rollouts.response_lengths[row])):
            with torch.no_grad():
                expected[row, column] = plain(torch.tensor([sequence])).logits.squeeze()
            sequence.append(int(rollouts.response_tokens[row, column]))
    assert expected.std() > 0.1
    torch.testing.assert_close(values, expected, rtol=0, atol=5e-5)  # found: 1e-5


def test_a_reward_model_brings_its_head_and_a_language_model_gets_one_of_zeros(tmp_path: Path) -> None:
    policy = tiny_model_folder(tmp_path / "policy")
    assert not read_back(policy).get_parameter(HEAD).any()
    reward_model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    draw_head(reward_model)
    reward_model.save_pretrained(tmp_path / "reward_model")
    found = read_back(tmp_path / "reward_model")
    assert torch.equal(found.get_parameter(HEAD), reward_model.get_parameter(HEAD))
    body = load_model(ModelConfig(path=str(policy)), device=CPU, dtype=torch.float32)
    for name, weight in body.base_model.named_parameters():
        assert torch.equal(found.base_model.get_parameter(name), weight)


def test_a_classifier_with_several_labels_is_no_value_model(tmp_path: Path) -> None:
    policy = tiny_model_folder(tmp_path / "policy")
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=3).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ModelError, match=r"critic\.path: .*score\.weight has shape \(3, 64\), not \(1, 64\)") as caught:
        read_back(tmp_path / "classifier")
    assert "one label" in str(caught.value)
    with pytest.raises(ModelError, match=r"critic\.path: .*classifier' is a classifier with 3 labels"):
        check_value_model(ModelConfig(path=str(tmp_path / "classifier")), vocab_size=104, max_sequence=10)
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(tmp_path / "reward_model")
    check_value_model(ModelConfig(path=str(tmp_path / "reward_model")), vocab_size=104, max_sequence=10)


def test_what_speaks_against_a_value_model_is_said_at_once(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "other", vocab_size=96, characters="0123456789")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        check_value_model(ModelConfig(path=str(folder)), vocab_size=104, max_sequence=600)
    for part in (
        "critic.path",
        "knows 96 tokens, and the policy can draw 104",
        "has no weights",
        "512 positions",
        "up to 600",
    ):
        assert part in str(caught.value)
    with pytest.raises(ModelError, match=r"critic\.path: '.*nowhere' does not exist"):
        check_value_model(ModelConfig(path=str(tmp_path / "nowhere")), vocab_size=104, max_sequence=10)
    check_value_model(ModelConfig(path=str(tiny_model_folder(tmp_path / "fits"))), vocab_size=104, max_sequence=10)


def test_an_architecture_without_a_value_model_is_refused() -> None:
    with pytest.raises(ModelError, match="no model with a value head for CohereConfig"):
        check_value_class(AutoConfig.for_model("cohere"))
