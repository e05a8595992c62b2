"""A model without memory for its weights, to be cut into pieces before any are made.

model = skeleton(config)                    parameters on "meta": names, shapes, dtypes, no memory
fully_shard(...) or a tensor-parallel plan  each rank's pieces, still without memory
materialise(model, device)                  memory for this rank's pieces only, filled by whoever reads or moves them
release(model)                              and without memory again
"""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tandem.errors import ModelError
from tandem.model.attention import NAMES, register
from tandem.model.file_names import saved_buffers


def skeleton(
    config: PreTrainedConfig, *, attention: str = NAMES["sdpa"], trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model of this config, float32, in evaluation mode, its parameters on the "meta" device, tied ones tied.

    Args:
        config: From `read_config` or `new_config`.
        attention: Name of the attention function, `attention_name(config.model)`.
        trust_remote_code: Code shipped with the model may run.
    """
    register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # which writes attention and dtype into the config that it is given
            deepcopy(config), attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def materialise(model: PreTrainedModel, device: torch.device) -> None:
    """Give this rank's pieces memory on `device`, with any content; buffers, which no file holds, get their values.

    Call it on the model itself, also where a module around it is sharded, too. Parameters with memory keep it.

    Raises:
        ModelError: A buffer's value is nowhere.
    """
    made: dict[int, nn.Parameter] = {}  # unlike `to_empty`, which would untie what is tied
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                made[id(parameter)] = _with_memory(parameter, device)
            module.register_parameter(name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            fresh = torch.empty_like(buffer, device=device)
            module._buffers[name] = fresh.fill_(math.nan) if buffer.is_floating_point() else fresh
    for parameter in made.values():
        parameter.__dict__["_is_hf_initialized"] = True  # then the architecture's own recipe leaves it alone
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)  # rotary frequencies, embedding scales
    for parameter in made.values():
        del parameter.__dict__["_is_hf_initialized"]
    _check_buffers(model)


def _check_buffers(model: PreTrainedModel) -> None:
    """Those that files hold are read later. Any other one must have been computed by the architecture's recipe."""
    saved = saved_buffers(model)
    for name, buffer in model.named_buffers():
        if name not in saved and buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise ModelError(
                f"{type(model).__name__} does not say how its buffer {name} is computed, which no file holds",
                remedy="train it with cluster.num_workers=1",
            )


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if not parameter.is_meta:
        return parameter
    return nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)


def release(model: PreTrainedModel) -> None:
    """Free the memory of the parameters; buffers keep theirs. `materialise` makes it anew."""
    freed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in freed:
                freed[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            module.register_parameter(name, freed[id(parameter)])
