"""What the tensors of a model are called in its files, and which of its elements they are.

Mostly a file has a model's tensors under the model's own names. transformers converts the others as it loads and saves:
a folder of Qwen3-MoE has `experts.7.gate_proj.weight`, `experts.7.up_proj.weight` and so on, and the model has one
tensor `experts.gate_up_proj` of all of them; old folders of GPT-2 lack the prefix `transformer.`. In all these cases a
file's tensor is a range of the elements of one of the model's, so that no rank needs more than its own to convert.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from tandem.errors import ModelError
from tandem.model.tensor_files import Piece

Shape = tuple[int, ...]


class FileNames:
    """The names of one model's tensors in files: `written` is what to write, `find` is for files that are there.

    Args:
        model: Before it is sharded, such as a `skeleton`; its names and shapes are looked at, not its weights.

    Raises:
        ModelError: This architecture's files hold tensors that are no ranges of the model's.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        assert not isinstance(model, FSDPModule), "its class is another one"  # and so are the conversions
        tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **saved_buffers(model)}
        self._shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        first_names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._tied = {
            name: first_names[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name not in self._shapes
        }
        self._prefix = model.base_model_prefix
        self._conversions = get_model_conversion_mapping(model)
        self.written = self._written(get_model_conversion_mapping(model, add_legacy=False), type(model).__name__)

    def _written(self, conversions: Sequence[WeightTransform], architecture: str) -> dict[str, Piece]:
        """As `save_pretrained` names the tensors of a model with new weights."""
        # A prefix that some folders have and others have not is no name to write.
        kept = [each.reverse_transform() for each in reversed(conversions) if not isinstance(each, PrefixChange)]
        renamings, converters = _sorted_out(kept)
        written: dict[str, Piece] = {}
        for name, shape in self._shapes.items():
            renamed, pattern = rename_source_key(name, renamings, converters, reverse=True)
            if pattern is None:
                written[renamed] = Piece(name, shape)
                continue
            converter = next(each for each in converters if pattern in each.source_patterns)
            if not _splits_experts(converter.operations):
                raise ModelError(
                    f"{architecture} cannot be read and written in parts: its files hold {name} in another order",
                    remedy="set cluster.num_workers=1",
                )
            parts = converter.target_patterns
            for part, target in enumerate(parts):
                for expert in range(shape[0]):
                    file_name = renamed.replace(parts[0], target, 1).replace("*", str(expert))
                    written[file_name] = _of_expert(name, shape, expert, part, len(parts))
        return written

    def find(self, stored: Iterable[str]) -> dict[str, Piece]:
        """Which pieces the tensors of some files are, by the rules of `from_pretrained`; those of no use are left out.

        Args:
            stored: The names in the files.
        """
        renamings, converters = _sorted_out(self._conversions)
        shapes = {**self._shapes, **{name: self._shapes[first] for name, first in self._tied.items()}}
        found: dict[str, Piece] = {}
        tied: dict[str, Piece] = {}
        experts: Counter[tuple[str, str]] = Counter()
        for stored_name in sorted(stored, key=dot_natural_key):
            name, pattern = rename_source_key(stored_name, renamings, converters, self._prefix, shapes)
            if name not in shapes and stored_name in shapes:  # which has the model's own names already
                name, pattern = stored_name, None
            if name in self._tied:
                tied[stored_name] = Piece(self._tied[name], shapes[name])
            elif name in shapes and pattern is None:
                found[stored_name] = Piece(name, shapes[name])
            elif name in shapes and pattern is not None:
                parts = next(each.source_patterns for each in converters if pattern in each.source_patterns)
                expert = experts[name, pattern]  # they come in the order of their numbers
                experts[name, pattern] += 1
                found[stored_name] = _of_expert(name, shapes[name], expert, parts.index(pattern), len(parts))
        have = {piece.name for piece in found.values()}
        for stored_name, piece in tied.items():  # a file may have one name of a tied tensor, the other one, or both
            if piece.name not in have:
                found[stored_name] = piece
                have.add(piece.name)
        return found


def saved_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that belong into files. They are small: every rank has them whole."""
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2] not in model.get_submodule(name.rpartition(".")[0])._non_persistent_buffers_set
    }


def _sorted_out(conversions: Sequence[WeightTransform]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    return renamings, converters


def _splits_experts(operations: Sequence[ConversionOps]) -> bool:
    """Whether a tensor [experts, parts * rows, ...] is split into one for each expert and part, and no more."""
    *before, last = operations
    return (
        isinstance(last, SplitModulelist)
        and last.dim == 0
        and all(isinstance(each, Chunk) and each.dim == 1 for each in before)
        and len(before) <= 1
    )


def _of_expert(name: str, shape: Shape, expert: int, part: int, num_parts: int) -> Piece:
    """One of the equal parts of an expert's rows."""
    own = (shape[1] // num_parts, *shape[2:])
    return Piece(name, own, (expert * num_parts + part) * math.prod(own))
