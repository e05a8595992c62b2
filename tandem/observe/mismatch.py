"""When engine and trainer are too far apart."""

from __future__ import annotations

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.rollout import RolloutConfig
from tandem.errors import TrainingError

WARN_ABOVE = 0.01  # nats per token: bfloat16 stays around 1e-3, float32 below 1e-9


def mismatch_warning(
    step: int, kl: float, algorithm: AlgorithmConfig, rollout: RolloutConfig
) -> tuple[str, str] | None:
    """What to say of a step, and what can be done; None where all is well or nothing was measured (NaN).

    Args:
        step: Its number.
        kl: `mismatch/kl` of the step.
        algorithm, rollout: These sections of the config.
    """
    if not kl > WARN_ABOVE:
        return None
    advice = _closer(rollout)
    if algorithm.correction == "none":
        advice += ", or correct for it (algorithm.correction=token_tis)"
    return _what(step, kl, f"more than the {WARN_ABOVE:g} that lower precision explains"), advice


def mismatch_error(step: int, kl: float, algorithm: AlgorithmConfig, rollout: RolloutConfig) -> TrainingError | None:
    """The error that ends the run; None where there is no bound, or the step is within it."""
    if algorithm.mismatch_stop is None or not kl > algorithm.mismatch_stop:
        return None
    return TrainingError(
        _what(step, kl, f"more than algorithm.mismatch_stop={algorithm.mismatch_stop:g}"),
        remedy=f"{_closer(rollout)}, or raise algorithm.mismatch_stop (each with run.allow_changes=true to go on after "
        "this step)",
    )


def _closer(rollout: RolloutConfig) -> str:
    engine = ", or sample with the trainer's own modules (rollout.engine=embedded)" if rollout.engine == "vllm" else ""
    return f"compute more precisely (model.dtype=float32, model.head_dtype=float32){engine}"


def _what(step: int, kl: float, bound: str) -> str:
    return (
        f"step {step}: the engine samples from another distribution than is trained: mismatch/kl is {kl:.2g}, {bound}"
    )
