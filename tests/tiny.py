"""Tiny models, tokenizers and data files, made on the spot: tests need no network and no download.

    folder = tiny_model_folder(tmp_path / "model", "Gemma3ForCausalLM")
    write_verl_parquet(tmp_path / "train.parquet", addition_rows(16))

The weights are larger than a fresh model's: near-uniform logits would hide an attention that looks at the wrong
tokens. Biases and norms are off their neutral 0 and 1, so that one left out is seen, too.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tandem.model.tokenizer import character_tokenizer

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
BOS_TOKEN = "<bos>"

# Writes BOS where the tokenizer has one; honours `enable_thinking`, like Qwen3's.
CHAT_TEMPLATE = (
    "{% if bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}(no thinking) {% endif %}{% endif %}"
)

_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GEMMA_LIKE = {
    **_LLAMA_LIKE,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", _LLAMA_LIKE),
    "Qwen2ForCausalLM": ("qwen2", _LLAMA_LIKE),
    "Qwen3ForCausalLM": ("qwen3", {**_LLAMA_LIKE, "head_dim": 16}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {**_LLAMA_LIKE, **_EXPERTS, "head_dim": 16}),
    "Gemma3ForCausalLM": ("gemma3_text", _GEMMA_LIKE),
    "Gemma2ForCausalLM": (
        "gemma2",
        {**_GEMMA_LIKE, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "MistralForCausalLM": ("mistral", {**_LLAMA_LIKE, "head_dim": 16, "sliding_window": 8}),
    "Phi3ForCausalLM": ("phi3", {**_LLAMA_LIKE, "original_max_position_embeddings": 512}),
    "GPT2LMHeadModel": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
}
"""What Tandem can train: architecture -> model_type and config."""

LONGROPE: dict[str, object] = {
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
    "original_max_position_embeddings": 32,
}
"""Overrides for a model whose frequencies are others beyond 32 positions."""

UNSUITABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3NextForCausalLM": (
        "qwen3_next",
        {
            **_LLAMA_LIKE,
            **_EXPERTS,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "MambaForCausalLM": ("mamba", {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "BloomForCausalLM": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "Lfm2ForCausalLM": ("lfm2", {**_LLAMA_LIKE, "layer_types": ["conv", "full_attention"]}),
}
"""What Tandem must refuse: recurrent, convolutional, or with an attention of its own."""


def tiny_tokenizer(
    *, characters: str = CHARACTERS, bos: bool = False, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """One token per character. With `bos`, encoding adds a BOS token by itself, as Llama's and Gemma's do."""
    tokenizer = character_tokenizer(characters)
    tokenizer.chat_template = chat_template
    if bos:
        tokenizer.add_special_tokens({"bos_token": BOS_TOKEN})
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS_TOKEN} $A", special_tokens=[(BOS_TOKEN, tokenizer.bos_token_id)]
        )
    return tokenizer


def tiny_model(
    architecture: str = "Qwen3ForCausalLM",
    *,
    vocab_size: int = 104,
    seed: int = 0,
    tie: bool = True,
    scale: float = 5.0,
    dtype: torch.dtype = torch.float32,
    attention: str = "eager",
    overrides: Mapping[str, object] | None = None,
) -> PreTrainedModel:
    """A model of two layers with random weights, the same for the same seed. `overrides` are fields of its config."""
    model_type, fields = {**ARCHITECTURES, **UNSUITABLE}[architecture]
    config = AutoConfig.for_model(
        model_type,
        **{
            **fields,
            "vocab_size": vocab_size,
            "tie_word_embeddings": tie,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
            **(overrides or {}),
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * 0.02 * scale)
            else:
                parameter.add_(noise * 0.1)
    return model.to(dtype).eval()


def tiny_model_folder(
    path: Path,
    architecture: str = "Qwen3ForCausalLM",
    *,
    seed: int = 0,
    tie: bool = True,
    scale: float = 5.0,
    dtype: torch.dtype = torch.float32,
    characters: str = CHARACTERS,
    bos: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    vocab_size: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Path:
    """A Hugging Face folder: config, safetensors, tokenizer, generation config. Returns `path`.

    Args:
        path: Where it goes; made if missing.
        architecture: A key of `ARCHITECTURES` or `UNSUITABLE`.
        seed: Of the weights.
        tie: One tensor for the embedding and the head.
        scale: The weights are drawn with a standard deviation of 0.02 times this.
        dtype: Of the saved weights.
        characters: The tokenizer's alphabet.
        bos: Give the tokenizer a BOS token that it adds by itself.
        chat_template: None = a model without one.
        vocab_size: Rows of the embedding. None = the tokenizer's, rounded up to a multiple of 8.
        eos_token_ids: EOS ids of the generation config. None = the tokenizer's.
        overrides: Fields of the model's config.
    """
    tokenizer = tiny_tokenizer(characters=characters, bos=bos, chat_template=chat_template)
    if vocab_size is None:
        vocab_size = -(-len(tokenizer) // 8) * 8
    bos_token_id = tokenizer.bos_token_id if bos else None
    model = tiny_model(
        architecture,
        vocab_size=vocab_size,
        seed=seed,
        tie=tie,
        scale=scale,
        dtype=dtype,
        overrides={"bos_token_id": bos_token_id, **(overrides or {})},
    )
    model.generation_config.eos_token_id = list(eos_token_ids) if eos_token_ids else tokenizer.eos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def addition_rows(count: int, *, data_source: str = "addition") -> list[dict[str, Any]]:
    """Rows in verl's schema: one-digit sums, all of them different for up to 100."""
    rows: list[dict[str, Any]] = []
    for index in range(count):
        left, right = index % 10, (index // 10 + index) % 10
        rows.append(
            {
                "data_source": data_source,
                "prompt": [{"role": "user", "content": f"What is {left} + {right}?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(left + right)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    return rows


def write_verl_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Rows as a parquet file. Returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Rows as a file with one JSON object on each line. Returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
