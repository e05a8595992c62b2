"""Contract 3: what the engine says of the tokens it draws is what the trainer finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tandem as td
from tests.unit.hybrid.made import contrast, rollout, start_tiny, trainer_logprobs

TOLERANCE = 2e-5


def gap(workers: td.Workers, rollouts: td.Rollouts) -> float:
    return float((trainer_logprobs(workers, rollouts) - rollouts.rollout_logprobs).abs().max())


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kv_cache_gib", ["auto", 0.002])
def test_fault_25_after_a_huge_update_the_engine_samples_with_the_new_weights(
    tmp_path: Path, tie: bool, kv_cache_gib: str | float
) -> None:
    """Several times over, so that the engine has slept and woken, and has held old weights."""
    workers = start_tiny(tmp_path / "model", lr=0.1, tie=tie, config={"rollout": {"kv_cache_gib": kv_cache_gib}})
    before = rollout(workers)
    assert gap(workers, before) < TOLERANCE
    for version in (1, 2):
        with workers.train_phase() as trainer:
            trainer.update(before, contrast(before))
        assert float((trainer_logprobs(workers, before) - before.rollout_logprobs).abs().max()) > 0.5, "hardly moved"
        after = rollout(workers)
        assert after.policy_version == version
        assert gap(workers, after) < TOLERANCE
        before = after


def test_fault_25_two_rollouts_in_one_phase_and_in_two_are_the_same(tmp_path: Path) -> None:
    """With the cache used again, and with a new one after sleep."""
    workers = start_tiny(tmp_path / "model")
    first = rollout(workers)
    again = rollout(workers)
    with workers.rollout_phase() as engine:
        twice = [engine.generate(first.prompts, n=4, max_response_length=8, temperature=0.7, step=1) for _ in range(2)]
    for other in (again, *twice):
        assert torch.equal(other.response_tokens, first.response_tokens)
        assert torch.equal(other.rollout_logprobs, first.rollout_logprobs)


def test_fault_26_tied_embeddings_are_one_tensor_in_both_phases_and_after_saving(tmp_path: Path) -> None:
    workers = start_tiny(tmp_path / "model", lr=0.1)
    rollouts = rollout(workers)
    with workers.train_phase() as trainer:
        trainer.update(rollouts, contrast(rollouts))
    model = workers.model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    folder = workers.export(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.get_input_embeddings().weight.data_ptr() == loaded.get_output_embeddings().weight.data_ptr()
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight), name


def test_fault_21_at_temperature_07_everything_is_of_the_same_distribution(tmp_path: Path) -> None:
    """Log-probs of engine and trainer, and the entropy, against plain transformers and softmax(z / 0.7)."""
    workers = start_tiny(tmp_path / "model", lr=1e-12)
    rollouts = rollout(workers, temperature=0.7)
    with workers.train_phase() as trainer:
        update = trainer.update(rollouts, contrast(rollouts))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    entropies = []
    for row in range(len(rollouts)):
        prompt, length = rollouts.prompt_of(row).tokens, int(rollouts.response_lengths[row])
        response = rollouts.response_tokens[row, :length]
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *response.tolist()]])).logits[0, len(prompt) - 1 : -1]
        distribution = torch.log_softmax(logits / 0.7, dim=-1)
        expected = distribution.gather(1, response[:, None])[:, 0]
        assert update.logprobs is not None
        torch.testing.assert_close(rollouts.rollout_logprobs[row, :length], expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(update.logprobs[row, :length], expected, rtol=0, atol=TOLERANCE)
        entropies.append(-(distribution.exp() * distribution).sum(-1))
    assert update.entropy == pytest.approx(float(torch.cat(entropies).mean()), abs=1e-5)
    assert update.metrics["mismatch/logprob_diff_max"] < TOLERANCE


def test_fault_20_training_uses_the_sampled_ids(tmp_path: Path) -> None:
    """Random responses hold the EOS and pad tokens' neighbours, spaces and newlines: no text is tokenised again."""
    workers = start_tiny(tmp_path / "model", lr=1e-12)
    rollouts = rollout(workers, n=8, length=16, temperature=1.0)
    texts = [workers.tokenizer.encode(text) for text in rollouts.texts]
    ids = [rollouts.response_tokens[row, : rollouts.response_lengths[row]].tolist() for row in range(len(rollouts))]
    assert texts != ids, "nothing is shown: each text encodes to its own ids"
    assert gap(workers, rollouts) < TOLERANCE


def test_the_reference_stays_as_it_was(tmp_path: Path) -> None:
    workers = start_tiny(tmp_path / "model", lr=0.1)
    rollouts = rollout(workers)
    for _ in range(2):
        with workers.train_phase() as trainer:
            reference = trainer.ref_logprobs(rollouts)
            torch.testing.assert_close(reference, rollouts.rollout_logprobs, rtol=0, atol=TOLERANCE)
            update = trainer.update(rollouts, contrast(rollouts), ref_logprobs=reference)
    assert update.kl is not None
    assert update.kl > 0.1, "given to an update without a KL term, it is reported"
