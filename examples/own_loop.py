"""A GRPO loop of your own, in fifteen lines: the public API of Tandem on a tiny model that is built here.

    python examples/own_loop.py

It needs nothing but Tandem: no GPU, no download. The model begins with random weights and learns to answer each
letter with the same letter.
"""

from __future__ import annotations

import tandem as td

MODEL = {
    "new": {"architecture": "Qwen3ForCausalLM", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32},
    "tokenizer": {"characters": "abcdefgh="},
}  # fmt: skip


def letters():
    """The data: any function that yields rows; a parquet or jsonl file does as well."""
    for letter in "abcdefgh":
        yield {"prompt": f"{letter}=", "ground_truth": letter}


def same(response: str, ground_truth: str) -> float:
    """The reward: any function, called in a process of its own."""
    return float(response[:1] == ground_truth)


def main(steps: int = 40) -> list[float]:
    """Train; return the mean reward of each step."""
    means = []
    workers = td.start(lr=3e-3, config={"model": MODEL, "cluster": {"threads": 1}})
    prompts = td.Prompts(f"{__file__}:letters", workers.tokenizer, per_step=8, seed=0)
    for step, batch in enumerate(prompts.take(steps)):
        with workers.rollout_phase() as engine:
            rollouts = engine.generate(batch, n=16, max_response_length=2, step=step)
        rewards = td.score(same, rollouts)
        advantages = td.grpo_advantages(rewards.values, rollouts.group_ids, valid=rewards.valid)
        with workers.train_phase() as trainer:
            update = trainer.update(rollouts, advantages, loss=td.ClippedSurrogate(0.2, 0.2))
        means.append(rewards.mean)
        print(f"step {step:2d}  reward {rewards.mean:.2f}  clipped {update.clip_fraction:.2f}", flush=True)
    return means


if __name__ == "__main__":
    main()
