from __future__ import annotations

import io
import math
from pathlib import Path

import rich.console
import torch

from tandem.batch import Evaluation
from tandem.config import config_from_dict
from tandem.observe.console import Console
from tandem.observe.run import Run
from tandem.summary import show_end
from tests.unit.observe.made import made_rewards, made_rollouts, made_update


def shown_at_the_end(folder: Path, evaluations: list[float | None], *, lora_rank: int = 0) -> str:
    """What is said after steps with these values of pass@1, the first one from before the first step."""
    file = io.StringIO()
    given = {"model": {"path": "tiny", "lora_rank": lora_rank}, "run": {"folder": str(folder)}}
    config = config_from_dict(given, need_data=False, need_reward=False)
    with Run(config, console=Console(rich.console.Console(file=file, width=200))) as run:
        for step, value in enumerate(evaluations):
            evaluation = None if value is None else Evaluation(step=step, metrics={"pass@1": value}, num_prompts=4)
            if step > 0:
                run.log(step, made_rollouts(), made_rewards(), torch.zeros(4), made_update(), evaluation)
            elif evaluation is not None:
                run.log_initial(evaluation)
        show_end(run)
    return file.getvalue()


def test_only_an_evaluation_after_the_first_step_is_one_after(tmp_path: Path) -> None:
    assert "pass@1 before: 0.250\npass@1 after: 0.500 (step 1)\n" in shown_at_the_end(tmp_path / "a", [0.25, 0.5])
    without = shown_at_the_end(tmp_path / "b", [0.25, None])
    assert "pass@1 before: 0.250\n" in without
    assert "pass@1 after" not in without


def test_a_run_of_adapters_names_the_export_of_these(tmp_path: Path) -> None:
    assert " --to my-adapter --adapter\n" in shown_at_the_end(tmp_path / "a", [0.25], lora_rank=4)
    assert "--adapter" not in shown_at_the_end(tmp_path / "b", [0.25])


def test_what_could_not_be_measured_is_none(tmp_path: Path) -> None:
    text = shown_at_the_end(tmp_path, [math.nan, math.nan])
    assert "before the first step: pass@1 none\n" in text
    assert "pass@1 before: none\npass@1 after: none (step 1)\n" in text
    assert "nan" not in text
