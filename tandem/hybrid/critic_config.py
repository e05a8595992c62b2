"""Which critic a config asks for, and what speaks against it."""

from __future__ import annotations

from pathlib import Path

from tandem.checkpoint import find_checkpoint
from tandem.config.critic import CriticConfig
from tandem.config.schema import Config
from tandem.errors import ConfigError, Problem
from tandem.model.facts import plain_config
from tandem.model.source import resolve_model_path
from tandem.model.tokenizer import check_same_tokens
from tandem.model.value import check_value_class, check_value_model


def critic_config(config: Config) -> CriticConfig | None:
    """The critic's section, a local path as the one folder that it is now; None where advantages need no critic."""
    critic = config.critic
    if not config.algorithm.has_critic:
        return None
    if critic.path is None or not Path(critic.path).expanduser().exists():
        return critic
    folder = Path(resolve_model_path(critic.path, key="critic.path")).absolute()
    return critic.model_copy(update={"path": str(folder)})


def check_critic(config: Config, *, of_run: bool = True) -> None:
    """Find out before weights are loaded that there can be no critic.

    Args:
        config: Resolved.
        of_run: It is that of a whole run: its limits of lengths hold, and one that goes on may have a critic already.

    Raises:
        ModelError: With everything that speaks against it.
    """
    critic, model, folder = critic_config(config), config.model, config.run.folder
    checkpoint = find_checkpoint(Path(folder)) if of_run and folder is not None else None
    if critic is None or (checkpoint is not None and (checkpoint / "critic").exists()):
        return
    policy = plain_config(model)
    if critic.path is None:
        check_value_class(policy)
        return
    check_value_model(
        model.model_copy(update={"path": critic.path, "new": None, "lora_rank": 0}),
        vocab_size=policy.vocab_size,
        max_sequence=config.data.max_prompt_length + config.rollout.max_response_length if of_run else None,
    )
    check_same_tokens(model, critic.path, key="critic.path")


def check_critic_warmup(config: Config, num_steps: int) -> None:
    """Raise ConfigError where a run of so many steps ends before its first update of the policy."""
    warmup = config.critic.warmup_steps
    if config.algorithm.has_critic and warmup >= num_steps:
        message = f"is {warmup}, so within the {num_steps} steps of this run the policy would never be updated"
        raise ConfigError([Problem("critic.warmup_steps", message, f"set it below {num_steps}, or give run.steps")])
