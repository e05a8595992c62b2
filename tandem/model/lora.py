"""LoRA (arXiv:2106.09685): the weights stay, and next to each of them two small factors are trained.

    W x + alpha / r * B A x        A [r, in] random, B [out, r] zero: before the first update nothing has changed

peft puts its layers into the transformers model; this is the only file that knows it. A model's names change:

    model.layers.0.mlp.up_proj.weight    is    ...up_proj.base_layer.weight, beside
                                               ...up_proj.lora_A.default.weight and ...up_proj.lora_B.default.weight

`base_name` gives a parameter the name that it has in the model without adapters, by which files and engines know it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.model.delta import Delta
from tandem.model.shards import Shard
from tandem.model.tensor_files import Piece

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

T = TypeVar("T")
_ADAPTER = "default"  # peft's name for the only one
_IN_FILES = "base_model.model."  # before a module's name


class Lora:
    """The adapters of one model: puts them in, freezes everything else, knows what they are called.

    Args:
        model: Loaded, or a `skeleton`; before it is sharded. Adapters are float32, on its device, of any content.
        config: Its `lora_rank`, `lora_alpha` and `lora_targets`; `check_model` has found nothing against them.
    """

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        from peft import LoraConfig, inject_adapter_in_model  # an extra
        from peft.tuners.lora import LoraLayer

        targets = target_names(model, config.lora_targets)
        self.rank = config.lora_rank
        self.scale = config.lora_alpha / config.lora_rank
        self.transposed = _is_transposed(model)
        self._config = LoraConfig(
            task_type="CAUSAL_LM",
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=targets,
            fan_in_fan_out=self.transposed,
        )
        with torch.random.fork_rng(devices=[]):  # peft fills A; `begin` does it again, the same for any number of ranks
            inject_adapter_in_model(self._config, model)
        self._layers: dict[str, LoraLayer] = {
            name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
        }
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad
        }

    @staticmethod
    def base_name(name: str) -> str:
        """What a parameter, frozen or of an adapter, is called without adapters around it."""
        return name.replace(".base_layer.", ".")

    def without_adapters(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """Those of the model's own parameters, by the names that they have without adapters."""
        return {self.base_name(name): each for name, each in tensors.items() if name not in self.shapes}

    @property
    def pieces(self) -> dict[str, Piece]:
        """The factors by their names in the files of an adapter, as peft gives them."""
        return {
            _IN_FILES + name.replace(f".{_ADAPTER}.", "."): Piece(name, shape) for name, shape in self.shapes.items()
        }

    @torch.no_grad()
    def begin(self, shards: Mapping[str, Shard], *, seed: int) -> None:
        """Fill this rank's shards of the factors for the first time: B with zeros, A at random (peft's own recipe).

        A ~ U(-1/sqrt(in), 1/sqrt(in)), the same for every number of ranks.
        """
        for name, shard in shards.items():
            if ".lora_B." in name:
                shard.tensor.zero_()
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            bound = 1 / math.sqrt(shard.shape[1])
            whole = torch.empty(shard.shape).uniform_(-bound, bound, generator=generator)
            shard.tensor.copy_(whole[shard.first_row : shard.first_row + len(shard.tensor)])

    def deltas(self, factors: Mapping[str, Tensor]) -> dict[str, Delta]:
        """What is added to each adapted weight, by its name in the model without adapters.

        Args:
            factors: All of them, whole, by the model's names.
        """
        return {
            f"{name}.weight": Delta.of(
                factors[f"{name}.lora_A.{_ADAPTER}.weight"],
                factors[f"{name}.lora_B.{_ADAPTER}.weight"],
                self.scale,
                transposed=self.transposed,
            )
            for name in self._layers
        }

    @contextmanager
    def off(self) -> Generator[None]:
        """Within the block the model computes what it does without adapters, to the bit.

        peft's own switch would change `requires_grad`, which FSDP reads once.
        """
        for layer in self._layers.values():
            layer.set_scale(_ADAPTER, 0.0)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.set_scale(_ADAPTER, 1.0)

    def save_config(self, folder: Path, base: str) -> None:
        """Write `adapter_config.json`, by which `peft.PeftModel.from_pretrained` knows what the factors are.

        Args:
            folder: Of the adapter.
            base: Folder or hub name of the model without adapters.
        """
        fields: dict[str, Any] = {**self._config.to_dict(), "base_model_name_or_path": base, "inference_mode": True}
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in fields.items()}
        (folder / "adapter_config.json").write_text(
            json.dumps(plain, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


def target_names(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """The last parts of the names of the layers that get adapters, sorted."""
    every = {_last(name) for name in _linear_layers(model)}
    return sorted(every if targets == "all-linear" else every & set(targets))


def lora_problems(config: ModelConfig, model: PreTrainedModel) -> list[ModelError]:
    """What speaks against the adapters that the config asks for, on this model, a `skeleton`."""
    if config.lora_rank == 0:
        return []
    problems: list[ModelError] = []
    if importlib.util.find_spec("peft") is None:
        message = f"model.lora_rank is {config.lora_rank}, and adapters need peft, which is not installed"
        problems.append(ModelError(message, remedy="pip install peft, or set model.lora_rank=0"))
    names = target_names(model, "all-linear")
    if config.lora_targets != "all-linear":
        unknown = sorted(set(config.lora_targets) - set(names))
        if unknown:
            problems.append(
                ModelError(
                    f"model.lora_targets: {type(model).__name__} has no linear layer {', '.join(unknown)} in its body",
                    remedy=f"its layers are {', '.join(names)}; the embedding and the head have no adapters",
                )
            )
    largest = max((min(layer.weight.shape) for layer in _target_layers(config, model)), default=config.lora_rank)
    if config.lora_rank > largest:  # the product of the factors has this rank at most
        message = f"model.lora_rank is {config.lora_rank}, and no layer that gets adapters is wider than {largest}"
        remedy = f"set it to {largest} at most; or to 0, which trains all weights"
        problems.append(ModelError(message, remedy=remedy))
    return problems


def _target_layers(config: ModelConfig, model: PreTrainedModel) -> list[nn.Linear | Conv1D]:
    names = target_names(model, config.lora_targets)
    return [layer for name, layer in _linear_layers(model).items() if _last(name) in names]


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """By name; without the head, which is often the embedding as well."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def num_adapter_parameters(config: ModelConfig, model: PreTrainedModel) -> int:
    """How many numbers the adapters of this model, a `skeleton`, have; 0 without adapters."""
    return config.lora_rank * sum(sum(layer.weight.shape) for layer in _target_layers(config, model))


def _is_transposed(model: PreTrainedModel) -> bool:
    """Whether its linear layers have weights [in, out]."""
    return any(isinstance(module, Conv1D) for module in _linear_layers(model).values())


def _last(name: str) -> str:
    return name.rpartition(".")[2]
