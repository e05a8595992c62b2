"""Models that give each state a value: the body of a language model, and a head with one output in place of `lm_head`.

They are transformers' classes for classifying sequences, with one label. So a reward model can be taken as it is, and
what is saved is a folder that transformers loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.model.attention import NAMES, register
from tandem.model.file_names import FileNames, saved_buffers
from tandem.model.hf import read_config
from tandem.model.shards import Shard
from tandem.model.source import resolve_model_path, weights_folder, weights_problems
from tandem.model.support import fit_problems, support_problems, together
from tandem.model.tensor_files import read, stored_tensors

HEAD = "score.weight"  # [1, D]; the name that all of these classes have for it
_KEY = "critic.path"


def check_value_model(source: ModelConfig, *, vocab_size: int, max_sequence: int | None) -> None:
    """Read the config of a value model, no weights, and report everything that speaks against it.

    Args:
        source: Its `path` is that of the value model.
        vocab_size, max_sequence: See `fit_problems`.

    Raises:
        ModelError: It cannot be used.
    """
    config = read_config(source, key=_KEY)
    value_class = _class_of(config)
    problems = [_no_class(config)] if value_class is None else support_problems(config, value_class, _KEY)
    problems += weights_problems(resolve_model_path(str(source.path), key=_KEY), key=_KEY)
    problems += _label_problems(config, str(source.path))
    problems += fit_problems(config, _KEY, str(source.path), vocab_size=vocab_size, max_sequence=max_sequence)
    if problems:
        raise together(problems)


def check_value_class(config: PreTrainedConfig) -> None:
    """Raise ModelError where transformers has no value model for this language model's config."""
    if _class_of(config) is None:
        raise _no_class(config)


def value_skeleton(
    config: PreTrainedConfig, *, attention: str = NAMES["sdpa"], trust_remote_code: bool = False
) -> PreTrainedModel:
    """The value model of a language model's config: like `skeleton`, float32, without memory for its weights.

    Raises:
        ModelError: transformers has none for this architecture.
    """
    check_value_class(config)
    register()
    config = deepcopy(config)
    config.num_labels = 1
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(
            config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    return model.eval()


@torch.no_grad()
def take_body(
    model: PreTrainedModel, shards: Mapping[str, Shard], policy: PreTrainedModel, policy_shards: Mapping[str, Shard]
) -> None:
    """Give a value model the body of a policy of the same architecture, cut in the same way, and a head of zeros.

    With these every value is 0 at first, so that advantages begin as those without a critic; and no random number is
    drawn.
    """
    for name, shard in shards.items():
        if name == HEAD:
            shard.tensor.zero_()
        else:
            shard.tensor.copy_(policy_shards[name].tensor)
    for name, buffer in saved_buffers(model).items():
        buffer.copy_(policy.get_buffer(name))


@torch.no_grad()
def read_value_weights(
    source: ModelConfig, model: PreTrainedModel, shards: Mapping[str, Shard], *, names: FileNames, key: str = _KEY
) -> None:
    """Read this rank's part of the value model at `source.path`, in place. Where files have no head, it is zeros.

    Args:
        source: Its `path` is used: a reward model's, a critic's of an earlier run, or a language model's.
        model: Materialised.
        shards: Of all parameters, by the model's names.
        names: Of the model's tensors in files.
        key: What gave the path, for messages.

    Raises:
        ModelError: The folder lacks weights, or they do not fit the config.
    """
    into = {**{name: Shard.whole(buffer) for name, buffer in saved_buffers(model).items()}, **shards}
    try:
        folder = weights_folder(str(source.path))
        if all(piece.name != HEAD for piece in names.find(stored_tensors(folder)).values()):
            into.pop(HEAD).tensor.zero_()
        read(folder, into, find=names.find)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{key}: the weights of {source.path!r} cannot be loaded: {error}",
            remedy="the folder must hold a language model, or a classifier with one label, with all its safetensors "
            "files",
        ) from error


def _label_problems(config: PreTrainedConfig, path: str) -> list[ModelError]:
    """A language model has no head for labels, whatever number its config has by default."""
    is_classifier = any(name.endswith("Classification") for name in config.architectures or ())
    if not is_classifier or config.num_labels == 1:
        return []
    message = f"{_KEY}: {path!r} is a classifier with {config.num_labels} labels, and a value is one number"
    return [ModelError(message, remedy="give a language model, or a classifier with one label")]


def _class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    return found if isinstance(found, type) else None


def _no_class(config: PreTrainedConfig) -> ModelError:
    return ModelError(
        f"critic: transformers has no model with a value head for {type(config).__name__}",
        remedy="set critic.path to a model of another architecture, or choose an algorithm.advantage without a critic",
    )
