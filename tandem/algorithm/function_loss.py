"""A wrapper that makes a loss of a user's own function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tandem.algorithm.loss_inputs import LossInputs
from tandem.algorithm.masked import Aggregation, check_aggregation, masked_sum
from tandem.algorithm.own_function import call_function, check_function
from tandem.algorithm.protocols import LossFunction, LossOutput
from tandem.errors import FunctionError


@dataclass(frozen=True)
class FunctionLoss:
    """A user's own loss function, with what the trainer must know about it.

    Args:
        function: See `LossFunction`.
        aggregation, constant_length: See `token_weights`; they make the weights that the function's losses get.
        needs_reference: Whether the function needs `ref_logprobs`.
        needs_entropy: Whether it needs `entropy`, with gradient.
        idle_without_advantage: Promise that a response of advantage 0 has no gradient: such responses are then not run.

    Raises:
        FunctionError: The function asks for what there is not.
        ValueError: `aggregation` and `constant_length` are no pair.
    """

    function: LossFunction
    aggregation: Aggregation = "token_mean"
    constant_length: int | None = None
    needs_reference: bool = False
    needs_entropy: bool = False
    idle_without_advantage: bool = False

    def __post_init__(self) -> None:
        check_function("loss", self.function, LossFunction)
        check_aggregation(self.aggregation, self.constant_length)

    def __call__(
        self,
        *,
        logprobs: Float[Tensor, "b L"],
        old_logprobs: Float[Tensor, "b L"],
        advantages: Float[Tensor, " b #L"],
        response_mask: Bool[Tensor, "b L"],
        weights: Float[Tensor, "b L"],
        correction: Float[Tensor, "b L"] | None = None,
        ref_logprobs: Float[Tensor, "b L"] | None = None,
        entropy: Float[Tensor, "b L"] | None = None,
    ) -> LossOutput:
        """Call the function on what lies inside the mask, and sum up its token losses with the weights.

        Returns:
            As `ClippedSurrogate`, without the metrics that belong to clipping.

        Raises:
            FunctionError: The function returned no tensor with a gradient, or neither one number nor a loss for each
                token; or it failed where something that it names was not there.
        """
        inputs = LossInputs.inside(
            response_mask,
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            advantages=advantages,
            ref_logprobs=ref_logprobs,
            entropy=entropy,
            correction=correction,
        )
        inputs.require(reference=self.needs_reference, entropy=self.needs_entropy)
        weights = weights if inputs.correction is None else weights * inputs.correction
        result = self._call(inputs, weights)
        return LossOutput(
            loss=result if result.ndim == 0 else masked_sum(weights * result, response_mask),
            num_tokens=response_mask.sum(),
            metrics=inputs.metrics(inputs.ratio),
            ratio=torch.where(response_mask, inputs.ratio, 0.0),
        )

    def _call(self, inputs: LossInputs, weights: Float[Tensor, "b L"]) -> Float[Tensor, "..."]:
        """One number or the losses of tokens."""
        # Copies: what a function does to them in place must change neither the weights nor what is reported.
        given = {
            "logprobs": inputs.logprobs,
            "old_logprobs": inputs.old_logprobs,
            "ref_logprobs": inputs.ref_logprobs,
            "advantages": inputs.advantages,
            "response_mask": inputs.mask,
            "weights": weights,
            "entropy": inputs.entropy,
        }
        copies = {name: None if matrix is None else matrix.clone() for name, matrix in given.items()}
        result = call_function("loss", self.function, copies)
        if not isinstance(result, Tensor):
            raise FunctionError(
                f"the loss function {self.function!r} must return a tensor, it returned a {type(result).__name__}",
                remedy="return the losses of tokens, a tensor of the shape of `logprobs`",
            )
        if inputs.logprobs.requires_grad and not result.requires_grad:
            raise FunctionError(
                f"the loss function {self.function!r} returned a tensor without a gradient",
                remedy="compute it from `logprobs`, not detached",
            )
        if result.shape not in (torch.Size(), inputs.mask.shape):
            raise FunctionError(
                f"the loss function {self.function!r} must return one number or token losses of shape "
                f"{tuple(inputs.mask.shape)}, it returned shape {tuple(result.shape)}",
                remedy="return the losses of tokens as they are: Tandem sums them up",
            )
        return result
