"""Named collections of settings: what each paper did. The user's own keys win; the resolved config shows every value.

A preset sets what its paper states and what makes the algorithm what it is; a comment says where a value is from
elsewhere. What a paper leaves open stays at Tandem's default. Sizes, lengths and learning rates are those of the
papers' models, from 1 to 32 billion parameters: for others, give your own.
"""

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


def preset_of(values: Mapping[str, Any]) -> Preset | None:
    """The one that nested plain values name; None where they name none that there is."""
    algorithm = values.get("algorithm")
    name = algorithm.get("preset") if isinstance(algorithm, Mapping) else None
    return PRESETS.get(name) if isinstance(name, str) else None


PRESETS: dict[str, Preset] = {
    "notes": Preset(
        "GRPO as the notes on verl teach it: 4 passes in mini-batches of 8 responses, shuffled one by one",
        {
            "rollout.n": 8,
            "algorithm.advantage": "grpo",
            "algorithm.normalize_std": "none",
            "algorithm.loss": "ppo_clip",
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
            "algorithm.advantage": "grpo",
            "algorithm.normalize_std": "group",
            "algorithm.loss": "ppo_clip",
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
            "algorithm.advantage": "dr_grpo",
            "algorithm.loss": "ppo_clip",
            "algorithm.loss_aggregation": "constant",
            "algorithm.kl_coef": 0.0,
            "trainer.lr": 1e-6,
            "trainer.lr_schedule": "constant",
        },
    ),
    "dapo": Preset(
        "A wider upper range, other prompts for groups without contrast, a mean over tokens, a soft limit on length "
        "(DAPO, arXiv:2503.14476, sections 3 and 4.1)",
        {
            "data.prompts_per_step": 512,
            "rollout.n": 16,
            "rollout.max_response_length": 20480,  # 16,384 without a penalty, and the buffer
            "reward.overlong_buffer": 4096,
            "reward.overlong_penalty": 1.0,
            "algorithm.advantage": "grpo",
            "algorithm.normalize_std": "group",
            "algorithm.loss": "ppo_clip",
            "algorithm.loss_aggregation": "token_mean",
            "algorithm.clip_low": 0.2,
            "algorithm.clip_high": 0.28,
            "algorithm.idle_groups": "resample",
            "algorithm.max_resample": 10,  # of the authors' script; the paper names no bound
            "algorithm.kl_coef": 0.0,
            "trainer.lr": 1e-6,
            "trainer.lr_schedule": "constant",
            "trainer.warmup_steps": 20,
            "trainer.mini_batch_responses": 512,  # 16 updates per step
        },
    ),
    "gspo": Preset(
        "One ratio for each response, in a narrow range (GSPO, arXiv:2507.18071, sections 4.1 and 5.1)",
        {
            "algorithm.advantage": "grpo",
            "algorithm.normalize_std": "group",
            "algorithm.loss": "gspo",
            "algorithm.loss_aggregation": "sequence_mean",
            "algorithm.clip_low": 3e-4,
            "algorithm.clip_high": 4e-4,
            "algorithm.kl_coef": 0.0,
            "trainer.mini_batch_responses": 128,  # 4 updates per step, here of 64 x 8 responses
        },
    ),
    "cispo": Preset(
        "Clipped importance weights, so that no token loses its gradient (MiniMax-M1, arXiv:2506.13585, section 3)",
        {
            "algorithm.advantage": "grpo",
            "algorithm.normalize_std": "group",
            "algorithm.loss": "cispo",
            "algorithm.loss_aggregation": "token_mean",
            "algorithm.clip_low": 1.0,  # no lower bound
            "algorithm.clip_high": 4.0,  # weights up to 5, as in ScaleRL (arXiv:2510.13786); the paper's is not told
            "algorithm.idle_groups": "resample",
            "algorithm.kl_coef": 0.0,
            "trainer.betas": (0.9, 0.95),
            "trainer.mini_batch_responses": 32,  # 16 updates per step, here of 64 x 8 responses
        },
    ),
    "rloo": Preset(
        "REINFORCE on whole responses, each against the mean of the others, with the KL divergence in the reward "
        "(arXiv:2402.14740, sections 3 and C)",
        {
            "data.prompts_per_step": 128,  # 4 responses each: the paper's rollout batch of 512
            "rollout.n": 4,
            "algorithm.advantage": "rloo",
            "algorithm.loss": "ppo_clip",
            "algorithm.loss_aggregation": "sequence_sum",
            "algorithm.kl_coef": 0.03,
            "algorithm.kl_estimator": "k1",
            "algorithm.kl_place": "reward",
            "trainer.lr": 1e-6,
            "trainer.lr_schedule": "constant",
            "trainer.warmup_steps": 18,  # 3 % of the paper's 600 steps
            "trainer.mini_batch_responses": 256,
        },
    ),
    "reinforce_pp": Preset(
        "REINFORCE with rewards scaled over the whole step and the KL divergence in the reward of each token; one "
        "response per prompt is enough (REINFORCE++, arXiv:2501.03262)",
        {
            "algorithm.advantage": "reinforce_plus_plus",
            "algorithm.gamma": 1.0,
            "algorithm.loss": "ppo_clip",
            "algorithm.clip_low": 0.2,
            "algorithm.clip_high": 0.2,
            "algorithm.kl_coef": 0.01,
            "algorithm.kl_estimator": "k1",
            "algorithm.kl_place": "reward",
            "trainer.lr": 5e-7,
        },
    ),
    "ppo": Preset(
        "PPO with a critic (arXiv:1707.06347), with the values of Open-Reasoner-Zero (arXiv:2503.24290, section 2), "
        "whose critic makes 12 updates per step; here it makes as many as the policy",
        {
            "data.prompts_per_step": 128,
            "rollout.n": 64,
            "rollout.max_response_length": 8000,
            "rollout.temperature": 1.0,
            "algorithm.advantage": "gae",
            "algorithm.gamma": 1.0,
            "algorithm.lam": 1.0,
            "algorithm.loss": "ppo_clip",
            "algorithm.clip_low": 0.2,
            "algorithm.clip_high": 0.2,
            "algorithm.kl_coef": 0.0,
            "algorithm.entropy_coef": 0.0,
            "critic.lr": 5e-6,
            "trainer.lr": 1e-6,
            "trainer.lr_schedule": "constant",
            "trainer.warmup_steps": 50,
            "trainer.weight_decay": 0.0,
            "trainer.betas": (0.9, 0.95),
            "trainer.update_epochs": 1,
        },
    ),
}
