"""Section `model`: the policy, its tokenizer, and the precision in which it computes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tandem.config.section import Auto, Count, CountOrZero, Section, SomeTexts, Text


class CharacterTokenizer(Section):
    """A tokenizer with one token for each character, built from the config."""

    characters: Text = Field(..., description="The characters, in the order of their token ids.")


class ModelConfig(Section):
    """The policy, its tokenizer, and the precision in which it computes."""

    path: Text | None = Field(
        None, description="Model folder, hub name, or the folder of a run or of a checkpoint. Give this or model.new."
    )
    new: dict[str, Any] | None = Field(
        None,
        description=(
            "Build a new model with random weights: {architecture: Qwen3ForCausalLM, num_hidden_layers: 4, ...}; "
            "all keys but architecture go to the architecture's transformers config."
        ),
    )
    tokenizer: Text | CharacterTokenizer | None = Field(
        None,
        description=(
            'Folder or hub name of the tokenizer, or {characters: "0123456789+= "} to build one with a token for '
            "each character. null = model.path."
        ),
    )
    trust_remote_code: bool = Field(False, description="Run Python code that is shipped with the model or tokenizer.")
    dtype: Auto | Literal["float32", "bfloat16"] = Field(
        "auto",
        description=(
            "Precision of the computation, in rollout and training; weights of the optimizer are float32 always. "
            "auto = bfloat16 on a GPU, float32 on a CPU."
        ),
    )
    head_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of lm_head and log-softmax, in rollout and training."
    )
    attention: Auto | Literal["sdpa", "eager"] = Field(
        "auto", description="How attention is computed: PyTorch's fused kernels or plain products. auto = sdpa."
    )
    lora_rank: CountOrZero = Field(
        0, description="Train adapters of this rank (LoRA) and leave the weights as they are. 0 = train all weights."
    )
    lora_alpha: Count = Field(32, description="Adapters are scaled by lora_alpha / lora_rank.")
    lora_targets: Literal["all-linear"] | SomeTexts = Field(
        "all-linear",
        description="Names of the modules that get adapters: [q_proj, v_proj]. all-linear = every linear layer but "
        "the head.",
    )
