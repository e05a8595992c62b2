"""Section `rollout`: how the policy answers prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.config.section import Auto, Count, Positive, Section, Texts

TopP = Annotated[float, Field(gt=0, le=1)]


class RolloutConfig(Section):
    """How the policy answers prompts."""

    engine: Auto | Literal["embedded", "vllm"] = Field(
        "auto",
        description=(
            "What samples: embedded = Tandem's own engine; vllm = vLLM, in the workers' processes. "
            "auto = vllm where it is installed and there is a GPU."
        ),
    )
    vllm_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Further engine arguments of vLLM, by its own names, such as {block_size: 64}.",
    )
    n: Count = Field(8, description="Responses per prompt: the size of a group.")
    max_response_length: Count = Field(1024, description="Longest response, in tokens; longer ones are cut off.")
    temperature: Positive = Field(
        1.0, description="Logits are divided by it, while sampling and in training. 1 = the model's own distribution."
    )
    top_p: TopP = Field(
        1.0,
        description="Sample only from the likeliest tokens that together have this probability. 1 = from all tokens.",
    )
    top_k: Count | None = Field(None, description="Sample only from so many likeliest tokens. null = from all tokens.")
    stop: Texts = Field(
        (),
        description="Texts or special tokens that end a response, beside every EOS token of the generation config.",
    )
    max_concurrent: Count = Field(256, description="Most responses decoded at once by one copy of the weights.")
    kv_cache_gib: Positive | Auto = Field(
        "auto",
        description=(
            "Memory of each worker for keys and values while sampling, in GiB. auto = what max_concurrent responses "
            "need, a quarter of the memory at most, which the workers on a CPU share."
        ),
    )
    tensor_parallel: Count = Field(
        1,
        description=(
            "Workers that hold one copy of the weights together while sampling, each a slice of every layer. "
            "It divides cluster.num_workers (the others hold further copies and answer other prompts) and the model's "
            "heads, key-value heads, intermediate size and vocabulary."
        ),
    )

    @property
    def is_cut(self) -> bool:
        """Whether `top_p` or `top_k` leave tokens out."""
        return self.top_p < 1 or self.top_k is not None

    @property
    def has_cut_logprobs(self) -> bool:
        """Whether the log-probs kept while sampling are of the distribution that is left, as vLLM's are."""
        return self.engine == "vllm" and self.is_cut
