"""Every metric that Tandem writes: one table with unit, reduction over ranks, format, meaning, and verl's name for it.

`docs/metrics.md` is made from it: `python -m tandem.observe.metrics > docs/metrics.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min"]
Names = Literal["tandem", "verl"]


@dataclass(frozen=True)
class Metric:
    """What one number in `metrics.jsonl` is. `verl` is set only where verl's metric has the same unit."""

    unit: str
    reduction: Reduction  # how the values of several ranks become one
    format: str  # format spec for people
    meaning: str
    verl: str | None = None


METRICS: Mapping[str, Metric] = {
    "reward/mean": Metric(
        "reward", "mean", ".3f", "Mean reward of the valid responses, as the function gave it.", "critic/rewards/mean"
    ),
    "reward/mean_kept": Metric(
        "reward", "mean", ".3f", "The same of what is learnt from: the groups kept, less the price of long responses."
    ),
    "reward/std": Metric("reward", "mean", ".3f", "Sample standard deviation of the valid responses' rewards."),
    "reward/invalid": Metric(
        "responses",
        "sum",
        ".0f",
        "Responses without a reward: the function failed on them, or on the greedy response to compare them with.",
    ),
    "rollout/batches": Metric(
        "batches", "max", ".0f", "Batches of prompts drawn; 1 without algorithm.idle_groups=resample."
    ),
    "rollout/groups_resampled": Metric(
        "groups", "sum", ".0f", "Groups without contrast that were put aside, and others drawn instead."
    ),
    "rollout/groups_surplus": Metric(
        "groups", "sum", ".0f", "Groups with contrast beyond data.prompts_per_step: drawn, and not learnt from."
    ),
    "rollout/groups_without_contrast": Metric(
        "groups",
        "sum",
        ".0f",
        "Groups in which no two valid rewards differ, of responses in the loss: nothing to learn from.",
    ),
    "rollout/response_length_mean": Metric("tokens", "mean", ".1f", "Mean response length.", "response_length/mean"),
    "rollout/response_length_max": Metric("tokens", "max", ".0f", "Longest response.", "response_length/max"),
    "rollout/truncated": Metric(
        "share", "mean", ".3f", "Responses cut off at the length limit.", "response_length/clip_ratio"
    ),
    "mismatch/kl": Metric(
        "nats",
        "mean",
        ".1e",
        "KL divergence per token from what the engine sampled by to what the trainer computes with the same weights.",
        "rollout_corr/k3_kl",
    ),
    "mismatch/logprob_diff_mean": Metric(
        "nats", "mean", ".1e", "Mean distance between the engine's and the trainer's log-prob of a token."
    ),
    "mismatch/logprob_diff_max": Metric("nats", "max", ".1e", "Largest distance between the two."),
    "mismatch/ratio_max": Metric(
        "ratio", "max", ".2f", "Largest ratio of the trainer's to the engine's probability of a token."
    ),
    "mismatch/share_outside": Metric(
        "share", "mean", ".1e", "Tokens whose ratio is outside of the correction's range; by sequence, where it is."
    ),
    "mismatch/staleness_kl": Metric(
        "nats", "mean", ".1e", "KL divergence per token from the policy that wrote the responses to the old policy."
    ),
    "policy/loss": Metric(
        "loss",
        "mean",
        ".4f",
        "The loss that the update descends, all terms; verl's is without KL and entropy.",
        "actor/pg_loss",
    ),
    "policy/kl": Metric(
        "nats", "mean", ".4f", "KL divergence from the reference per token; null without one.", "actor/kl_loss"
    ),
    "policy/approx_kl": Metric(
        "nats",
        "mean",
        ".1e",
        "Mean of old minus new log-prob of a token: how far the update has moved.",
        "actor/ppo_kl",
    ),
    "policy/ratio_mean": Metric(
        "ratio", "mean", ".3f", "Mean ratio of new to old probability of a token; with gspo, of its response."
    ),
    "policy/ratio_max": Metric("ratio", "max", ".2f", "The largest of these ratios."),
    "policy/clip_fraction": Metric(
        "share",
        "mean",
        ".3f",
        "Tokens whose gradient the clipping removed; with cispo, bounded.",
        "actor/pg_clipfrac",
    ),
    "policy/entropy": Metric(
        "nats", "mean", ".3f", "Entropy of the policy per token; null where it was not computed.", "actor/entropy"
    ),
    "policy/grad_norm": Metric(
        "norm", "mean", ".3f", "Norm of the gradient before clipping, mean over mini-batches.", "actor/grad_norm"
    ),
    "policy/lr": Metric("lr", "mean", ".1e", "Learning rate of the last update.", "actor/lr"),
    "policy/skipped_updates": Metric(
        "updates", "max", ".0f", "Updates left out because their loss or gradient was not finite."
    ),
    "critic/loss": Metric("loss", "mean", ".4f", "The loss of the critic.", "critic/vf_loss"),
    "critic/value_mean": Metric(
        "reward", "mean", ".3f", "What the critic expected, mean over tokens, before its update.", "critic/values/mean"
    ),
    "critic/explained_variance": Metric(
        "share",
        "mean",
        ".3f",
        "How much of the returns' variance the critic foresaw: 1 = all, 0 = no more than their mean; null where they "
        "are all equal.",
        "critic/vf_explained_var",
    ),
    "critic/clip_fraction": Metric(
        "share", "mean", ".3f", "Tokens whose value had moved beyond critic.clip_value.", "critic/vf_clipfrac"
    ),
    "critic/grad_norm": Metric("norm", "mean", ".3f", "Norm of the critic's gradient.", "critic/grad_norm"),
    "critic/lr": Metric("lr", "mean", ".1e", "Learning rate of the critic.", "critic/lr"),
    "critic/skipped_updates": Metric(
        "updates", "max", ".0f", "Updates of the critic left out because loss or gradient was not finite."
    ),
    "eval/pass@1": Metric("share", "mean", ".3f", "Held-out: chance that one sampled response is right."),
    "timing_s/step": Metric(
        "s", "max", ".1f", "The whole step: time since the line before, or since the first step began.", "timing_s/step"
    ),
    "timing_s/rollout": Metric("s", "max", ".1f", "Generating the responses.", "timing_s/gen"),
    "timing_s/reward": Metric(
        "s", "max", ".1f", "Waiting for rewards after the last response had ended.", "timing_s/reward"
    ),
    "timing_s/logprobs": Metric("s", "max", ".1f", "Old and reference log-probs.", "timing_s/old_log_prob"),
    "timing_s/update": Metric("s", "max", ".1f", "Forward, backward and optimizer.", "timing_s/update_actor"),
    "timing_s/values": Metric("s", "max", ".1f", "The critic's values.", "timing_s/values"),
    "timing_s/update_critic": Metric("s", "max", ".1f", "The critic's update.", "timing_s/update_critic"),
    "timing_s/to_rollout": Metric("s", "max", ".1f", "Handing the device to the engine: offloading, moving weights."),
    "timing_s/to_train": Metric(
        "s", "max", ".1f", "Handing the device to the trainer: freeing the engine's memory, loading what was offloaded."
    ),
    "timing_s/evaluation": Metric("s", "max", ".1f", "Held-out evaluation.", "timing_s/testing"),
    "timing_s/checkpoint": Metric(
        "s",
        "max",
        ".1f",
        "Saving, as far as training waited for it, since the line before.",
        "timing_s/save_checkpoint",
    ),
    "perf/tokens_per_s": Metric(
        "tokens/s",
        "sum",
        ".0f",
        "Tokens of all sequences, prompts included, per second of the step.",
        "perf/throughput",
    ),
    "perf/reshard_gib": Metric("GiB", "sum", ".2f", "Weights sent from rank to rank, from the trainer to the engine."),
    "memory/rollout_gib": Metric(
        "GiB",
        "max",
        ".2f",
        "Peak memory of a rank in the rollout phase: allocated on its GPU, or resident where the device is a CPU.",
    ),
    "memory/train_gib": Metric("GiB", "max", ".2f", "The same in the train phase."),
    "memory/to_rollout_gib": Metric("GiB", "max", ".2f", "The same while the engine takes over."),
    "memory/to_train_gib": Metric("GiB", "max", ".2f", "The same while the trainer takes over."),
}

FAMILIES: Mapping[str, Metric] = {
    "reward/<name>": Metric(
        "reward's own",
        "mean",
        ".3f",
        "A key that the reward function returned beside `score`, or one of several rewards.",
    ),
    "reward/mean/<data_source>": Metric(
        "reward", "mean", ".3f", "Mean reward of one data source, where there are more."
    ),
    "policy/<name>": Metric("loss's own", "mean", ".3f", "A metric that the loss function gave."),
    "eval/reward": Metric("reward", "mean", ".3f", "Held-out: mean reward."),
    "eval/pass@<k>": Metric(
        "share", "mean", ".3f", "Held-out: chance that one of k sampled responses is right, unbiased."
    ),
    "eval/pass@<k>_stderr": Metric("share", "mean", ".3f", "Standard error of it, over prompts."),
    "eval/<set or source>/...": Metric("share", "mean", ".3f", "The same for one evaluation set or data source."),
    "timing_s/<name>": Metric("s", "max", ".1f", "Time of a block that a loop of your own has timed."),
}

VOLATILE = ("timing_s/", "perf/", "memory/")  # differ between two otherwise identical runs


def reported_name(name: str, names: Names) -> str:
    """The name under which a tracker gets a metric. What verl has no equal for keeps Tandem's name."""
    if names == "tandem" or name not in METRICS:
        return name
    return METRICS[name].verl or name


def formatted(name: str, value: float) -> str:
    """A metric's value for people. Names outside of the table are shown with three decimals."""
    return format(value, METRICS[name].format if name in METRICS else ".3f")


def render_markdown() -> str:
    """The page `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "<!-- Made by `python -m tandem.observe.metrics > docs/metrics.md`; do not edit. -->",
        "",
        "A run writes one JSON object per step to `metrics.jsonl` in its folder; the line of step 0 is the evaluation",
        "before training. `null` means: not measured in this step. `eval/` keys stand in the lines of steps that",
        "evaluated. Two runs of one config agree in every key on a CPU, except in `timing_s/`, `perf/` and `memory/`.",
        "",
        "verl's name is the one that trackers get with `tracking.names=verl`; it is given where verl's metric has the",
        "same unit, and the same meaning unless noted. All others keep Tandem's name.",
        "",
        "| Name | Unit | Over ranks | Meaning | verl's name |",
        "|---|---|---|---|---|",
    ]
    for name, metric in {**METRICS, **FAMILIES}.items():
        verl = f"`{metric.verl}`" if metric.verl else ""
        lines.append(f"| `{name}` | {metric.unit} | {metric.reduction} | {metric.meaning} | {verl} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_markdown(), end="")
