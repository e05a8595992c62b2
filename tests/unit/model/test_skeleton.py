"""A model whose weights come later computes what one that was loaded at once does."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from tandem.config.model import ModelConfig
from tandem.model.hf import load_model, read_config
from tandem.model.skeleton import materialise, skeleton
from tests.tiny import ARCHITECTURES, LONGROPE, tiny_model_folder

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_buffers_are_those_of_a_loaded_model(architecture: str, tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny_model_folder(tmp_path / "model", architecture)))
    loaded = load_model(config, device=CPU, dtype=torch.float32)

    model = skeleton(read_config(config))
    assert all(parameter.is_meta for parameter in model.parameters())
    materialise(model, CPU)

    expected = dict(loaded.named_buffers())
    assert dict(model.named_buffers()).keys() == expected.keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    shapes = {name: parameter.shape for name, parameter in loaded.named_parameters()}  # a tied one is listed once
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert not any("_is_hf_initialized" in parameter.__dict__ for parameter in model.parameters())


def test_the_config_stays_as_it_is(tmp_path: Path) -> None:
    config = read_config(ModelConfig(path=str(tiny_model_folder(tmp_path / "model", dtype=torch.bfloat16))))
    before = deepcopy(vars(config))
    assert skeleton(config).config.dtype != config.dtype
    assert vars(config) == before


def test_stretched_frequencies_too(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny_model_folder(tmp_path / "model", "Phi3ForCausalLM", overrides=LONGROPE)))
    loaded = load_model(config, device=CPU, dtype=torch.float32)
    model = skeleton(read_config(config))
    materialise(model, CPU)
    for name, buffer in loaded.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
