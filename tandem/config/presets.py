"""Named collections of settings. The user's own keys win; the resolved config shows every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.display import show


@dataclass(frozen=True)
class Preset:
    """Settings by dotted key, and where they come from."""

    about: str
    settings: Mapping[str, Any]

    def shown(self) -> dict[str, str]:
        """The settings as they would be written in YAML."""
        return {key: show(value) for key, value in self.settings.items()}


PRESETS: dict[str, Preset] = {
    "notes": Preset(
        "GRPO as the notes on verl teach it: 4 passes in mini-batches of 8 responses, shuffled one by one",
        {
            "rollout.n": 8,
            "algorithm.normalize_std": "none",
            "algorithm.loss_aggregation": "sequence_mean",
            "algorithm.clip_low": 0.2,
            "algorithm.clip_high": 0.2,
            "algorithm.kl_coef": 0.0,
            "trainer.update_epochs": 4,
            "trainer.mini_batch_responses": 8,
            "trainer.mini_batch_shuffle": "responses",
        },
    ),
    "grpo": Preset(
        "GRPO as published (DeepSeekMath, arXiv:2402.03300, sections 4.1 and 4.2)",
        {
            "data.prompts_per_step": 16,  # 64 responses each: the paper's training batch of 1024
            "rollout.n": 64,
            "rollout.max_response_length": 1024,
            "algorithm.normalize_std": "group",
            "algorithm.loss_aggregation": "sequence_mean",
            "algorithm.kl_coef": 0.04,
            "algorithm.kl_estimator": "k3",
            "trainer.lr": 1e-6,
            "trainer.update_epochs": 1,
        },
    ),
    "dr_grpo": Preset(
        "GRPO without the biases of length and difficulty (Dr. GRPO, arXiv:2503.20783, section 3)",
        {
            "rollout.n": 8,
            "rollout.temperature": 1.0,
            "algorithm.normalize_std": "none",
            "algorithm.loss_aggregation": "constant",
            "algorithm.kl_coef": 0.0,
            "trainer.lr": 1e-6,
            "trainer.lr_schedule": "constant",
        },
    ),
}
