"""What is said where engine and trainer are apart. That a run ends: test_run.py, and tests/contract."""

from __future__ import annotations

import math

import pytest

from tandem.observe.mismatch import WARN_ABOVE, mismatch_error, mismatch_warning
from tests.unit.hybrid.made import config_of

OTHER_ENGINE = "or sample with the trainer's own modules (rollout.engine=embedded)"
CORRECT = "or correct for it (algorithm.correction=token_tis)"


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
@pytest.mark.parametrize("correction", ["none", "token_tis"])
def test_the_advice_is_of_what_the_run_does_not_do_already(engine: str, correction: str) -> None:
    config = config_of(rollout={"engine": engine}, algorithm={"correction": correction, "mismatch_stop": 0.1})
    warning = mismatch_warning(3, 0.2, config.algorithm, config.rollout)
    error = mismatch_error(3, 0.2, config.algorithm, config.rollout)
    assert warning is not None
    assert error is not None
    assert warning[0].startswith("step 3: the engine samples from another distribution than is trained")
    assert (OTHER_ENGINE in warning[1]) == (OTHER_ENGINE in str(error)) == (engine == "vllm")
    assert (CORRECT in warning[1]) == (correction == "none")


@pytest.mark.parametrize("kl", [math.nan, 0.0, WARN_ABOVE])
def test_nothing_is_said_of_a_step_within_the_bounds_or_not_measured(kl: float) -> None:
    config = config_of(algorithm={"mismatch_stop": 0.01})
    assert mismatch_warning(1, kl, config.algorithm, config.rollout) is None
    assert mismatch_error(1, kl, config.algorithm, config.rollout) is None
