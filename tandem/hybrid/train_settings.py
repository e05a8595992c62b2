"""How updates are made where a call does not say otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.algorithm.correction import Correction
from tandem.algorithm.losses import ClippedSurrogate, as_loss
from tandem.algorithm.protocols import Loss, LossFunction
from tandem.config.schema import Config
from tandem.errors import ConfigError, Problem
from tandem.trainer.optim import Schedule


@dataclass(frozen=True)
class TrainSettings:
    """How updates are made where a call does not say otherwise."""

    loss: Loss
    schedule: Schedule
    kl_in_reward: bool
    has_critic: bool
    critic_warmup: int  # steps in which only the critic learns; 0 where there is none
    old_logprobs: Literal["update", "rollout", "recompute"]
    correction: Correction
    mask_truncated: bool
    drop_idle_groups: bool
    seed: int

    @property
    def needs_reference(self) -> bool:
        """Whether `ref_logprobs` are needed, for the loss or for the rewards."""
        return self.loss.needs_reference or self.kl_in_reward


def check_loss(config: Config, loss: Loss | LossFunction | None) -> None:
    """Look at a loss of one's own.

    Raises:
        FunctionError: It asks for what there is not.
        ConfigError: It takes the place of terms that the config has weights for.
    """
    if loss is None:
        return
    as_loss(loss, ClippedSurrogate())  # looks at its signature
    algorithm = config.algorithm
    terms = [
        ("algorithm.kl_coef", 0.0 if algorithm.kl_in_reward else algorithm.kl_coef, "needs_reference"),
        ("algorithm.entropy_coef", algorithm.entropy_coef, "needs_entropy"),
    ]
    problems = [
        Problem(
            key,
            f"is {coef:g}, but this term is part of the loss that yours takes the place of",
            f"set {key}=0; your loss can have the term itself: td.FunctionLoss(your_function, {needs}=True)",
        )
        for key, coef, needs in terms
        if coef > 0
    ]
    if problems:
        raise ConfigError(problems)


def train_settings(config: Config, *, total_steps: int | None, loss: Loss | LossFunction | None) -> TrainSettings:
    """As a resolved config describes them; a loss that is given takes the place of the configured one."""
    algorithm, trainer = config.algorithm, config.trainer
    assert algorithm.old_logprobs != "auto", "the config is not resolved"
    assert algorithm.correction != "auto"
    critic_warmup = config.critic.warmup_steps if algorithm.has_critic else 0
    configured = ClippedSurrogate(
        surrogate=algorithm.loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        clip_dual=algorithm.clip_dual,
        aggregation=algorithm.loss_aggregation,
        constant_length=config.rollout.max_response_length,
        kl_coef=0.0 if algorithm.kl_in_reward else algorithm.kl_coef,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
    )
    return TrainSettings(
        loss=configured if loss is None else as_loss(loss, configured),
        schedule=Schedule(
            lr=trainer.lr,
            kind=trainer.lr_schedule,
            warmup_steps=trainer.warmup_steps,
            total_steps=None if total_steps is None else total_steps - critic_warmup,
            final=trainer.lr_final,
        ),
        kl_in_reward=algorithm.kl_in_reward,
        has_critic=algorithm.has_critic,
        critic_warmup=critic_warmup,
        old_logprobs=algorithm.old_logprobs,
        correction=Correction(algorithm.correction, *algorithm.correction_range),
        mask_truncated=algorithm.mask_truncated,
        drop_idle_groups=algorithm.idle_groups == "drop",
        seed=config.run.seed,
    )
