"""Loss or gradient that is not finite, over a whole run: skipped, counted, shown, and in the end an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem import config_from_dict, train
from tandem.errors import TrainingError
from tests.loop.small_run import metrics_of, small_config


@pytest.mark.parametrize("tolerated", [0, 2])
def test_fault_10_updates_that_are_not_finite_are_skipped_and_in_the_end_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tolerated: int
) -> None:
    trainer = {"lr": 1e30, "max_grad_norm": 1e30, "max_skipped_updates": tolerated}
    config = small_config(tmp_path, {"run": {"steps": 9}, "trainer": trainer})
    with pytest.raises(TrainingError, match=r"not finite(.|\n)*lower trainer.lr") as caught:
        train(config_from_dict(config))
    assert f"{tolerated + 1} updates in a row" in str(caught.value)
    lines = metrics_of(tmp_path / "run")
    assert [line["policy/skipped_updates"] for line in lines] == [0, *[1] * tolerated]
    assert ("updates skipped, loss or gradient was not finite" in capsys.readouterr().out) == (tolerated > 0)
