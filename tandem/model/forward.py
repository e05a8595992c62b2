"""From tokens to hidden states, and from those to logits, the same in both phases; or to values."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import ModelError
from tandem.model.attention import Spans


def hidden_states(
    model: PreTrainedModel,
    tokens: Int[Tensor, "b T"],
    positions: Int[Tensor, "b T"],
    spans: Spans,
    *,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "b T D"]:
    """The model's body on these tokens, with the attention that `spans` describe.

    Args:
        model: A causal language model with Tandem's attention.
        tokens, positions: What runs.
        spans: Which query sees which key.
        dtype: What the layers compute in. None = what their weights are in, which under FSDP is float32 all the same.
    """
    embeddings = model.get_input_embeddings()(tokens).to(dtype or body_dtype(model))
    output = model.base_model(inputs_embeds=embeddings, position_ids=positions, use_cache=False, spans=spans)
    return output.last_hidden_state


def body_dtype(model: PreTrainedModel) -> torch.dtype:
    """What the layers compute in. The embedding does not tell: where it is tied it has the head's dtype."""
    embedding = model.get_input_embeddings().weight
    return next(weight.dtype for weight in model.base_model.parameters() if weight is not embedding)


def head_logits(model: PreTrainedModel, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
    """Logits in float32, with the scaling or softcap that the architecture itself applies after `lm_head`.

    The product is taken in the head's own dtype (float32 unless `model.head_dtype` says otherwise).

    Raises:
        ModelError: The model has no output embeddings (`lm_head`).
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no lm_head", remedy="use a ...ForCausalLM architecture")
    logits = head(hidden.to(head.weight.dtype)).float()
    settings = vars(model.config)
    if settings.get("logit_scale") is not None:  # Cohere
        logits = logits * settings["logit_scale"]
    if settings.get("logits_scaling") is not None:  # Granite
        logits = logits / settings["logits_scaling"]
    softcap = settings.get("final_logit_softcapping")  # Gemma-2
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


def value_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head of a value model; None where the model is none."""
    head = dict(model.named_children()).get("score")  # by this name all of transformers' sequence classifiers have it
    return head if isinstance(head, nn.Linear) else None


def head_values(model: PreTrainedModel, hidden: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
    """Values in float32. The product is taken in the head's own dtype."""
    head = value_head(model)
    assert head is not None, "no value model"
    return head(hidden.to(head.weight.dtype)).float().squeeze(-1)
