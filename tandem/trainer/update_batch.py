"""What one step's update is computed from."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Bool, Float
from torch import Tensor

from tandem.algorithm.correction import Correction
from tandem.batch import Rollouts


@dataclass(frozen=True)
class UpdateBatch:
    """All that an update is computed from. `loss_mask` may leave out whole responses; they are in no denominator."""

    rollouts: Rollouts
    advantages: Float[Tensor, " B #L"]
    loss_mask: Bool[Tensor, "B L"]
    old_logprobs: Float[Tensor, "B L"] | None  # None: those of the policy as it is when the update begins
    ref_logprobs: Float[Tensor, "B L"] | None
    correction: Correction = field(default_factory=Correction)  # of old policy to engine: `old_logprobs` are own ones
    sampling_logprobs: Float[Tensor, "B L"] | None = None  # own ones, under the weights that sampled, where they differ

    def __post_init__(self) -> None:
        if self.correction.is_on and self.rollouts.cut_logprobs:
            raise ValueError(
                "with top_p or top_k vLLM keeps log-probs of a cut distribution, and a correction would compare them "
                "with those of the full one: set algorithm.correction=none, or sample without top_p and top_k"
            )
