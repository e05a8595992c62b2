"""The one attention function of Tandem: prefill, ragged decode and packed training, through unmodified models.

transformers models call the attention function that their config names. Tandem registers its own, and hands it the
one thing that differs between the phases as a keyword of the model's forward: `model(..., spans=spans)`. Spans know
which query may see which key and where keys and values live:

    PackedSpans (model/packed_spans.py)     training: sequences side by side in one row, prompts shared by their group
    CacheSpans  (rollout/kv_cache.py)       rollout: prompts prefilled into, and responses decoded from, a KV cache

No T x T mask of a whole row is ever built: attention runs segment by segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface

from tandem.errors import ModelError

NAMES = {"sdpa": "tandem", "eager": "tandem_eager"}  # kind -> the name that goes into the model's config

# Keywords that models pass along and that change nothing here: positions are applied to q and k before, and caching
# is the business of the spans.
_IGNORED = frozenset({"position_ids", "use_cache", "cache_position", "past_key_values", "is_causal"})


@dataclass(frozen=True)
class AttentionCall:
    """One layer's call. Query heads are a multiple of the key-value heads; they are grouped, never repeated here."""

    query: Float[Tensor, "b H T D"]
    key: Float[Tensor, "b h T D"]
    value: Float[Tensor, "b h T Dv"]
    layer: int
    scale: float
    sliding_window: int | None  # a query sees the last `sliding_window` keys, itself included; None = all before it
    softcap: float | None  # scores become softcap * tanh(scores / softcap) (Gemma-2)
    eager: bool


@runtime_checkable
class Spans(Protocol):
    """What the attention function needs to know of a batch."""

    def attend(self, call: AttentionCall) -> Float[Tensor, "b T H Dv"]: ...


def attend(
    call: AttentionCall,
    query: Float[Tensor, "s H Q D"],
    key: Float[Tensor, "s h K D"],
    value: Float[Tensor, "s h K Dv"],
    mask: Float[Tensor, "#s 1 rows K"] | None,
) -> Float[Tensor, "s H Q Dv"]:
    """Scaled dot-product attention of grouped heads under a mask made by `for_heads`; mask None = causal with Q = K.

    The H // h query heads that share a key-value head are laid along the query axis, so that K and V are never
    repeated in memory.
    """
    s, heads, q_len, _ = query.shape
    kv_heads = key.shape[1]
    repeat = heads // kv_heads
    if mask is None and not call.eager and call.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=call.scale, enable_gqa=repeat > 1
        )
    if mask is None:
        mask = for_heads(call, causal_mask(q_len, call.sliding_window, query.device)[None, None])
    if repeat > 1:
        query = query.reshape(s, kv_heads, repeat * q_len, query.shape[3])
    if call.eager or call.softcap is not None:
        out = _eager(query, key, value, mask, call.scale, call.softcap)
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.scale)
    return out.reshape(s, heads, q_len, value.shape[3])


def for_heads(call: AttentionCall, mask: Float[Tensor, "#s 1 Q K"]) -> Float[Tensor, "#s 1 rows K"]:
    """A mask as `attend` takes it: in the queries' dtype, its rows repeated for the heads that share keys and values.

    Make it once for all layers: it is as large as the scores of one key-value head.
    """
    repeat = call.query.shape[1] // call.key.shape[1]
    rows = mask if mask.shape[2] == 1 else mask.repeat(1, 1, repeat, 1)  # a single row is broadcast
    return rows.to(call.query.dtype)


def causal_mask(size: int, sliding_window: int | None, device: torch.device) -> Float[Tensor, "Q Q"]:
    """Additive mask of a sequence on its own."""
    steps = torch.arange(size, device=device)
    return additive(visible(steps[:, None] - steps[None, :], sliding_window))


def visible(distance: Tensor, sliding_window: int | None) -> Tensor:
    """True where a key `distance` positions back may be seen."""
    seen = distance >= 0
    return seen if sliding_window is None else seen & (distance < sliding_window)


def additive(seen: Tensor) -> Tensor:
    """0 where seen, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=torch.float32, device=seen.device).masked_fill_(~seen, -math.inf)


def _eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores + mask).softmax(dim=-1).to(value.dtype) @ value


def _tandem_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    spans: Spans | None = None,
    *,
    eager: bool = False,
    **others: object,
) -> tuple[Tensor, None]:
    """The function that transformers calls. `**others` exists to be refused: a keyword that is not understood may be
    one that changes the result, such as attention sinks."""
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _IGNORED)
    if unknown:
        raise ModelError(
            f"{type(module).__name__} passes attention options that Tandem's attention does not serve: {unknown}",
            remedy="use an architecture of the supported list in docs/architecture.md",
        )
    if spans is None:
        raise ModelError(
            "a model with Tandem's attention was called without `spans`",
            remedy='load a copy with attn_implementation="sdpa" to call it on its own',
        )
    if dropout != 0.0:
        raise ModelError(f"attention dropout is {dropout}, must be 0: log-probs would be random")
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} has no layer_idx")
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        layer=layer,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
        eager=eager,
    )
    return spans.attend(call), None


def register() -> None:
    """Make the attention functions known to transformers under NAMES; calling it again changes nothing."""
    AttentionInterface.register(NAMES["sdpa"], _tandem_attention)
    AttentionInterface.register(NAMES["eager"], partial(_tandem_attention, eager=True))
