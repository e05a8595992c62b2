"""The numbers of one step, from what flowed between its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tandem.batch import CriticUpdate, Drawn, Evaluation, Rewards, Rollouts, UpdateResult, with_contrast
from tandem.observe.metrics import METRICS


def step_metrics(
    rollouts: Rollouts,
    rewards: Rewards,
    update: UpdateResult | None,
    evaluation: Evaluation | None = None,
    critic: CriticUpdate | None = None,
    *,
    mask_truncated: bool = False,
) -> dict[str, float]:
    """Rollout, reward, policy and evaluation metrics of one step. NaN where something was not measured.

    Args:
        rollouts: The step's responses.
        rewards: Their rewards. Where the step has drawn more than it learns from, rollout and reward metrics are of
            all that was drawn, so that they tell of the policy and not of the choice.
        update: What the update did. Of its own `metrics` a full name, such as `mismatch/kl`, sets that
            metric; a bare one, such as the loss function gives, becomes `policy/<name>`. None = there was none.
        evaluation: Held-out results, in the steps that evaluate.
        critic: What the critic's update did, where there is a critic.
        mask_truncated: Responses that were cut off are not learnt from.
    """
    drawn = rewards.drawn or Drawn(rollouts, rewards)
    metrics = {
        **_reward_metrics(drawn.rollouts, drawn.rewards, mean_kept=rewards.mean),
        **_rollout_metrics(drawn.rollouts, drawn.rewards, mask_truncated=mask_truncated),
        "rollout/batches": float(drawn.num_batches),
        "rollout/groups_resampled": float(drawn.num_idle),
        "rollout/groups_surplus": float(drawn.num_surplus),
        **_policy_metrics(update),
        **_critic_metrics(critic),
        **(evaluation_metrics(evaluation) if evaluation is not None else {}),
    }
    for name, value in update.metrics.items() if update is not None else ():
        metrics[name if "/" in name else _free_name("policy", name, metrics)] = float(value)
    return metrics


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """An evaluation under the names that it has in `metrics.jsonl`."""
    return {f"eval/{name}": float(value) for name, value in evaluation.metrics.items()}


def num_tokens(rollouts: Rollouts) -> int:
    """Tokens of all sequences: each response with its prompt."""
    lengths = torch.tensor([len(prompt.tokens) for prompt in rollouts.prompts], dtype=torch.int64)
    prompt_tokens = lengths[rollouts.group_ids.cpu()].sum() if len(rollouts) else torch.zeros(())
    return int(prompt_tokens) + int(rollouts.response_lengths.sum())


def groups_without_contrast(rollouts: Rollouts, rewards: Rewards, *, mask_truncated: bool) -> int:
    """How many groups have no two responses in the loss whose valid rewards differ."""
    taking_part = rewards.valid.cpu() & rollouts.loss_mask(mask_truncated=mask_truncated).any(dim=1).cpu()
    num_groups = len(rollouts.prompts)
    contrast = with_contrast(rewards.values.cpu(), taking_part, rollouts.group_ids.cpu(), num_groups)
    return num_groups - int(contrast.sum())


def _reward_metrics(rollouts: Rollouts, rewards: Rewards, *, mean_kept: float) -> dict[str, float]:
    metrics = {
        "reward/mean": rewards.mean,
        "reward/mean_kept": mean_kept,
        "reward/std": rewards.std,
        "reward/invalid": float(rewards.num_invalid),
    }
    for name, value in rewards.metrics.items():
        metrics[_free_name("reward", name, metrics)] = float(value)
    sources = [rollouts.prompt_of(row).data_source or "unnamed" for row in range(len(rollouts))]
    if len(set(sources)) > 1:
        for source in sorted(set(sources)):
            rows = torch.tensor([other == source for other in sources]) & rewards.valid.cpu()
            values = rewards.values.cpu()[rows].double()
            metrics[f"reward/mean/{source}"] = float(values.mean())  # NaN where none is valid
    return metrics


def _rollout_metrics(rollouts: Rollouts, rewards: Rewards, *, mask_truncated: bool) -> dict[str, float]:
    lengths = rollouts.response_lengths.double()
    empty = len(rollouts) == 0
    return {
        "rollout/groups_without_contrast": float(
            groups_without_contrast(rollouts, rewards, mask_truncated=mask_truncated)
        ),
        "rollout/response_length_mean": math.nan if empty else float(lengths.mean()),
        "rollout/response_length_max": math.nan if empty else float(lengths.max()),
        "rollout/truncated": math.nan if empty else float(rollouts.truncated.double().mean()),
        # measured by the update, where the weights are still those that wrote the responses
        **{name: math.nan for name in METRICS if name.startswith("mismatch/")},
    }


def _policy_metrics(update: UpdateResult | None) -> dict[str, float]:
    if update is None:
        return {name: math.nan for name in METRICS if name.startswith("policy/")}
    return {
        "policy/loss": update.loss,
        "policy/kl": math.nan if update.kl is None else update.kl,
        "policy/approx_kl": math.nan,  # measured by the loss
        "policy/ratio_mean": update.ratio_mean,
        "policy/ratio_max": update.ratio_max,
        "policy/clip_fraction": update.clip_fraction,
        "policy/entropy": math.nan if update.entropy is None else update.entropy,
        "policy/grad_norm": update.grad_norm,
        "policy/lr": update.lr,
        "policy/skipped_updates": float(update.num_skipped),
    }


def _critic_metrics(critic: CriticUpdate | None) -> dict[str, float]:
    if critic is None:
        return {name: math.nan for name in METRICS if name.startswith("critic/")}
    return {
        "critic/loss": critic.loss,
        "critic/value_mean": critic.value_mean,
        "critic/explained_variance": critic.explained_variance,
        "critic/clip_fraction": critic.clip_fraction,
        "critic/grad_norm": critic.grad_norm,
        "critic/lr": critic.lr,
        "critic/skipped_updates": float(critic.num_skipped),
    }


def _free_name(room: str, name: str, metrics: Mapping[str, float]) -> str:
    """`room/name`, unless that is a measured metric already, for which a user's own must not pass."""
    key = f"{room}/{name}"
    return f"{room}/own/{name}" if math.isfinite(metrics.get(key, math.nan)) else key
