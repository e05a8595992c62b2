"""Log-probs of response tokens under a model: packed, in micro-batches."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tandem.batch import Rollouts
from tandem.errors import ModelError
from tandem.model.attention import NAMES
from tandem.model.ranks import ALONE, Ranks
from tandem.trainer.packing import Packing, PackingOptions, pack
from tandem.trainer.policy import Policy


@torch.no_grad()
def batch_logprobs(
    policy: Policy, rollouts: Rollouts, options: PackingOptions, ranks: Ranks = ALONE
) -> Float[Tensor, "B L"]:
    """Log-probs of all response tokens at the rollouts' temperature, without gradients; zeros beyond each response.

    Each of `ranks` runs some of the rows, and all of them get the whole.
    """
    result = torch.zeros(rollouts.response_tokens.shape, dtype=torch.float32)
    for rows, row in policy.packed(rollouts, range(len(rollouts)), options, ranks):
        logprobs, _ = policy(row, temperature=rollouts.temperature, entropy_gradient=False)
        result[rows] = row.to_matrix(logprobs).cpu()
    return ranks.sum(result.to(policy.device)).cpu()


def response_logprobs(
    model: PreTrainedModel, rollouts: Rollouts, *, chunk_tokens: int = 1024, packing: Packing = "auto"
) -> Float[Tensor, "B L"]:
    """Log-probs of all response tokens with gradients, for a PyTorch loop of your own. One packed forward pass.

    Args:
        model: A causal language model with Tandem's attention, such as `workers.model`.
        rollouts: Responses and the temperature they were sampled at.
        chunk_tokens: Tokens whose logits are in memory at once.
        packing: How sequences share the pass; `auto` takes what needs the fewest operations.

    Returns:
        float32; zeros beyond the end of each response.

    Raises:
        ModelError: The model was loaded with another attention; or gradients are on and its weights are not float32.
    """
    if model.config._attn_implementation not in NAMES.values():
        raise ModelError(
            f"the model's attention is {model.config._attn_implementation!r}, not Tandem's",
            remedy="take the model from workers: td.start(path).model",
        )
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if torch.is_grad_enabled() and dtypes - {torch.float32}:
        raise ModelError(
            "the model's weights are not all float32: an optimizer of your own would lose most small updates to "
            "rounding, and what it changes is not what the workers save",
            remedy='start them with td.start(path, config={"model": {"dtype": "float32"}}), or call this under '
            "torch.no_grad() where you need no gradient",
        )
    policy = Policy(model, chunk_tokens=chunk_tokens)
    row = pack(rollouts, range(len(rollouts)), packing=packing, costs=policy.costs(), device=policy.device)
    logprobs, _ = policy(row, temperature=rollouts.temperature, entropy_gradient=False)
    return row.to_matrix(logprobs)
