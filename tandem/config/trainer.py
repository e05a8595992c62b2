"""Section `trainer`: how the policy is updated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.config.section import Auto, Count, CountOrZero, NonNegative, Positive, Section, Share

Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]


class TrainerConfig(Section):
    """How the policy is updated."""

    mini_batch_responses: Count | None = Field(
        None, description="Responses per optimizer update, over all workers. null = all responses of the step."
    )
    mini_batch_shuffle: Literal["groups", "responses", "none"] = Field(
        "groups",
        description="What is shuffled before mini-batches are cut: whole groups, single responses, or nothing.",
    )
    update_epochs: Count = Field(1, description="Passes over the responses of one step.")
    micro_batch_tokens: Count | Auto = Field(
        "auto",
        description=(
            "Most tokens in one forward pass of a worker; changes memory and speed only. auto = by the model's shape."
        ),
    )
    packing: Auto | Literal["shared_prefix", "varlen", "none"] = Field(
        "auto",
        description=(
            "How sequences share a forward pass: shared_prefix = the responses of a group behind one copy of their "
            "prompt; varlen = one after the other; none = one at a time. auto = the one with the fewest operations."
        ),
    )
    logits_chunk_tokens: Count = Field(
        1024, description="Tokens whose logits are in memory at once; changes memory and speed only."
    )
    activation_checkpointing: bool | Auto = Field(
        "auto", description="Compute activations again in the backward pass: less memory, more time. auto = if needed."
    )
    replicas: Count = Field(
        1,
        description=(
            "Copies of the sharded weights while training, each over cluster.num_workers / replicas workers: more "
            "copies take more memory and less communication. 1 = shards over all workers."
        ),
    )
    offload: Auto | Literal["none", "host", "disk"] = Field(
        "auto",
        description=(
            "Where optimizer state, float32 weights and the reference are while nobody needs them: none = on the "
            "device, host = in the host's memory, disk = in the run's folder. auto = host on a GPU, none on a CPU."
        ),
    )
    lr: Positive = Field(1e-6, description="Learning rate of AdamW, at its highest.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the learning rate after the warm-up, up to the last step."
    )
    lr_final: Share = Field(
        0.0, description="Learning rate at the last step of a linear or cosine schedule, as a fraction of trainer.lr."
    )
    warmup_steps: CountOrZero = Field(10, description="Steps in which the learning rate rises from 0 to trainer.lr.")
    weight_decay: NonNegative = Field(0.0, description="Decoupled weight decay of AdamW.")
    betas: Betas = Field((0.9, 0.999), description="Decay rates of AdamW's two moments.")
    max_grad_norm: Positive = Field(1.0, description="Gradients with a larger norm are scaled down to it.")
    max_skipped_updates: CountOrZero = Field(
        5, description="Updates with a non-finite loss or gradient are skipped; stop after more than so many in a row."
    )
