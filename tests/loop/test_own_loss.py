"""A loss of one's own in a whole run: what it takes from the config, and what it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import tandem as td
from tandem.algorithm.protocols import Loss, LossFunction
from tandem.errors import ConfigError
from tests.loop.small_run import metrics_of, small_config


def gradient(*, logprobs: Tensor, advantages: Tensor, **_: object) -> Tensor:
    """On policy, what the clipped surrogate does."""
    return -advantages * logprobs


def run(folder: Path, loss: Loss | LossFunction | None, **algorithm: object) -> list[dict[str, object]]:
    folder.mkdir()
    config = small_config(folder, {"run": {"steps": 2, "folder": str(folder / "run")}, "algorithm": algorithm})
    return metrics_of(td.train(td.config_from_dict(config), loss=loss))


def test_a_function_is_summed_up_as_the_config_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To 1e-4: with one update per step the surrogate's gradient is the same up to rounding."""
    found = {
        name: [line["policy/grad_norm"] for line in run(tmp_path / name, loss, loss_aggregation=aggregation)]
        for name, loss, aggregation in (
            ("own", gradient, "sequence_sum"),
            ("configured", None, "sequence_sum"),
            ("wrapped", td.FunctionLoss(gradient), "sequence_sum"),
            ("mean", None, "token_mean"),
        )
    }
    assert found["own"] == pytest.approx(found["configured"], rel=1e-4)
    assert found["wrapped"] == pytest.approx(found["mean"], rel=1e-4)
    assert found["own"] != pytest.approx(found["mean"], rel=0.1)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("algorithm: ")]
    assert shown == [
        "algorithm: grpo, a loss of your own, sequence_sum",
        "algorithm: grpo, ppo_clip, clip 0.2/0.2, sequence_sum, no KL",
        "algorithm: grpo, a loss of your own, token_mean",
        "algorithm: grpo, ppo_clip, clip 0.2/0.2, token_mean, no KL",
    ]


@pytest.mark.parametrize(
    "loss",
    [gradient, td.FunctionLoss(gradient), td.ClippedSurrogate()],
    ids=["function", "FunctionLoss", "ClippedSurrogate"],
)
def test_terms_that_a_loss_of_ones_own_has_not_are_refused(tmp_path: Path, loss: Loss | LossFunction) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path / "run", loss, kl_coef=0.1, entropy_coef=0.01)
    assert [str(problem) for problem in caught.value.problems] == [
        f"algorithm.{name}: is {coef}, but this term is part of the loss that yours takes the place of\n      -> set "
        f"algorithm.{name}=0; your loss can have the term itself: td.FunctionLoss(your_function, {needs}=True)"
        for name, coef, needs in (("kl_coef", 0.1, "needs_reference"), ("entropy_coef", 0.01, "needs_entropy"))
    ]
    assert not (tmp_path / "run" / "run").exists()


def test_a_penalty_in_the_reward_goes_with_any_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(run(tmp_path / "run", gradient, kl_coef=0.1, kl_place="reward")) == 2
    assert "a loss of your own, token_mean, KL 0.1 by k3 in the reward" in capsys.readouterr().out
