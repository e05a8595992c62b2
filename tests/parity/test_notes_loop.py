"""Contract 1: a step of Tandem with the preset `notes` is the notes' plain loop, token by token, weight by weight."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import tandem as td
from tests.parity.notes_loop import Answer, Settings, run_step
from tests.parity.notes_reward import compute_score
from tests.tiny import addition_rows, tiny_model_folder, write_verl_parquet

NOTES = Path(__file__).parents[2] / "examples" / "notes.yaml"
REWARD = Path(__file__).with_name("notes_reward.py")
LR, LENGTH, PROMPTS = 2e-5, 10, 4


def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def run_tandem(tmp_path: Path, *overrides: str) -> tuple[td.Config, Path]:
    """One step of `tandem train examples/notes.yaml` on a tiny model and tiny data."""
    config = td.load_config(
        NOTES,
        [
            f"model.path={tmp_path / 'model'}",
            f"data.train={tmp_path / 'train.parquet'}",
            f"data.prompts_per_step={PROMPTS}",
            "data.max_prompt_length=100",
            f"rollout.max_response_length={LENGTH}",
            f"trainer.lr={LR}",
            "trainer.warmup_steps=0",
            f"run.folder={tmp_path / 'run'}",
            "run.steps=1",
            "cluster.threads=1",
            f"reward.function={REWARD}:compute_score",
            "reward.workers=1",
            *overrides,
        ],
    )
    return config, td.train(config)


def same_responses(run: Path, answers: list[Answer]) -> None:
    lines = (run / "rollouts" / "step_000001.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    assert [line["tokens"] for line in logged] == [answer.tokens for answer in answers]
    assert [line["response"] for line in logged] == [answer.text for answer in answers]
    assert [line["reward"] for line in logged] == pytest.approx([answer.reward for answer in answers])
    assert [line["advantage"] for line in logged] == pytest.approx([answer.advantage for answer in answers], abs=1e-6)
    for line, answer in zip(logged, answers, strict=True):
        assert line["rollout_logprobs"] == pytest.approx(answer.old_logprobs.tolist(), abs=2e-5)


def same_weights(run: Path, before: PreTrainedModel, after: PreTrainedModel) -> None:
    """Within 1e-6, of weights that have moved by up to 16 updates of LR each.

    AdamW divides a gradient by its own size. Where a gradient is near 0, its rounding error alone, which differs
    between the two loops and between processors, moves a weight by a part of LR. One weight in a thousand may.
    """
    found = plain(run / "checkpoints" / "step_000001" / "model").state_dict()
    start = before.state_dict()
    names = list(start)
    moved = torch.cat([(after.state_dict()[name] - start[name]).flatten() for name in names])
    error = torch.cat([(found[name] - after.state_dict()[name]).flatten() for name in names])
    for name in names:
        assert (after.state_dict()[name] - start[name]).abs().max() > LR / 2, f"{name} has not moved: nothing is shown"
    assert (error.abs() > 1e-6).float().mean() < 1e-3
    assert error.abs().max() < LR
    assert error.norm() / moved.norm() < 1e-3


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_one_step_gives_the_same_responses_and_the_same_weights(tmp_path: Path, kl_coef: float) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    write_verl_parquet(tmp_path / "train.parquet", addition_rows(8))
    overrides = ["rollout.temperature=0.8"]
    reference = None
    if kl_coef:
        other = tiny_model_folder(tmp_path / "reference", scale=4.9)  # near, but not the policy: there the KL is 0
        reference = plain(other)
        overrides += [f"algorithm.kl_coef={kl_coef}", f"algorithm.reference={other}"]

    config, run = run_tandem(tmp_path, *overrides)

    before, tokenizer = plain(folder), AutoTokenizer.from_pretrained(folder)
    after = copy.deepcopy(before)
    prompts = td.Prompts.from_config(config.data, tokenizer, seed=config.run.seed).next_batch()
    settings = Settings(lr=LR, max_response_length=LENGTH, seed=config.run.seed, temperature=0.8, kl_coef=kl_coef)
    answers = run_step(after, reference, tokenizer, prompts, compute_score, settings)

    same_responses(run, answers)
    same_weights(run, before, after)
    metrics = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert metrics["policy/clip_fraction"] > 0, "no ratio left the range: clipping is not shown"
