"""Section `algorithm`: advantages and the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.config.section import Auto, Count, NonNegative, Positive, Section, Share, Text

ClipLow = Annotated[float, Field(gt=0, le=1)]
ClipDual = Annotated[float, Field(gt=1)]
AroundOne = Annotated[tuple[Share, Annotated[float, Field(ge=1)]], Field(strict=False)]
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gae"]
PresetName = Literal["notes", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"]
Correction = Literal["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask"]


class AlgorithmConfig(Section):
    """Advantages and the loss."""

    preset: PresetName | None = Field(
        None, description="A named collection of settings, in several sections; keys that are given otherwise win."
    )
    advantage: Advantage = Field(
        "grpo",
        description=(
            "What a response's reward is compared with: grpo, dr_grpo = the mean of its group, which only grpo can "
            "divide by a standard deviation; rloo = the mean of the others of its group; reinforce_plus_plus = the "
            "mean of the step, over tokens; reinforce_plus_plus_baseline = the mean of its group, then scaled over the "
            "step; remax = the reward of the greedy response to its prompt; gae = the values of a critic."
        ),
    )
    normalize_std: Literal["none", "group", "batch"] = Field(
        "none",
        description="With advantage=grpo: divide by the standard deviation of the rewards of the group, of the step, "
        "or not.",
    )
    gamma: Share = Field(
        1.0, description="Discount per token of what comes later, with advantage=gae or reinforce_plus_plus."
    )
    lam: Share = Field(
        1.0,
        description="With advantage=gae: 1 trusts the rewards only, 0 the critic's value of the next token only.",
    )
    loss: Literal["ppo_clip", "gspo", "cispo"] = Field(
        "ppo_clip",
        description=(
            "ppo_clip = the clipped ratio of each token; gspo = of each response: the geometric mean of its tokens' "
            "ratios; cispo = the clipped ratio of each token as a weight, so that no token loses its gradient."
        ),
    )
    loss_aggregation: Literal["token_mean", "sequence_mean", "token_sum", "sequence_sum", "constant"] = Field(
        "token_mean",
        description=(
            "How the losses of tokens become one: token_mean = over all tokens; sequence_mean = mean over each "
            "response, then over responses; token_sum = plain sum; sequence_sum = sum over each response, then mean "
            "over responses; constant = sequence_sum divided by rollout.max_response_length."
        ),
    )
    clip_low: ClipLow = Field(0.2, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: Positive = Field(0.2, description="The ratio is clipped above at 1 + clip_high.")
    clip_dual: ClipDual | None = Field(
        None, description="For negative advantages, the ratio counts for this much at most (dual clip). null = off."
    )
    old_logprobs: Auto | Literal["update", "rollout", "recompute"] = Field(
        "auto",
        description=(
            "Log-probs of the policy that wrote the responses: update = those of the update itself (one update per "
            "step); rollout = those kept while sampling; recompute = a pass of their own before the first update. "
            "auto = the cheapest that is exact."
        ),
    )
    idle_groups: Literal["keep", "drop", "resample"] = Field(
        "keep",
        description=(
            "Groups whose rewards are all equal: keep them in the denominator of the loss, drop them, or draw other "
            "prompts in their place (DAPO's dynamic sampling)."
        ),
    )
    max_resample: Count = Field(
        3, description="With idle_groups=resample: batches of prompts drawn in one step at most, the first included."
    )
    mask_truncated: bool = Field(
        False, description="Leave responses that were cut off at max_response_length out of the loss."
    )
    kl_coef: NonNegative = Field(
        0.0, description="Weight of the KL divergence from the reference; above 0 the reference is loaded."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Estimate of the KL divergence per token, with d = ref_logprob - logprob: k1 = -d, k2 = d^2 / 2, "
        "k3 = exp(d) - d - 1. In the loss k1 is no penalty on average: it is for kl_place=reward.",
    )
    kl_place: Literal["loss", "reward"] = Field(
        "loss",
        description="Where the KL divergence goes: a term of the loss, or a penalty in the reward of each token.",
    )
    entropy_coef: NonNegative = Field(0.0, description="Weight of the entropy bonus in the loss.")
    correction: Auto | Correction = Field(
        "auto",
        description=(
            "How the loss makes up for an engine that samples from a slightly other distribution than is trained: each "
            "token weighs as much as the trainer finds it likelier than the engine did. token_tis = ratios of tokens, "
            "cut at the upper end of algorithm.correction_range; sequence_tis = ratios of whole responses, likewise; "
            "token_mask and sequence_mask = 0 outside of the range. auto = token_tis where log-probs of engine and "
            "trainer may differ (bfloat16, vLLM) and are of the same distribution, else none."
        ),
    )
    correction_range: AroundOne = Field(
        (0.0, 2.0),
        description="The ratios that the correction leaves as they are, [lower, upper]; the lower end is for masks.",
    )
    mismatch_stop: Positive | None = Field(
        None,
        description="Stop the run where engine and trainer are further apart than this: a bound on mismatch/kl, in "
        "nats per token. null = warn only.",
    )
    reference: Text | None = Field(
        None,
        description="Model folder or hub name of the reference. null = the policy as it was before the first step.",
    )

    @property
    def has_critic(self) -> bool:
        """Whether a second model says what reward is to be expected."""
        return self.advantage == "gae"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL divergence is a penalty in the rewards, which the advantages are made of."""
        return self.kl_coef > 0 and self.kl_place == "reward"
