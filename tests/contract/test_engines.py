"""One contract for all rollout engines: the same tests, whichever samples."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tandem as td
from tandem.errors import DataError, ModelError, PhaseError
from tandem.hybrid.worker import Worker
from tests.contract.engines import (
    LENGTHS,
    MAX_RESPONSE_LENGTH,
    SIZE,
    TOLERANCE,
    each_engine,
    folder_of,
    gap,
    start_with,
)
from tests.unit.hybrid.made import contrast, prompts_of, rollout, trainer_logprobs, worker_of

EOS_IDS = (1, 10, 20, 30, 40, 50, 60, 70)  # of 104 tokens: one response in two ends within 8
PAD_ID = 10  # which is an EOS, too


@pytest.fixture(scope="module", params=["tied", "untied"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("models") / request.param, tie=request.param == "tied")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {**SIZE, "pad_token_id": PAD_ID}
    return folder_of(
        tmp_path_factory.mktemp("models") / "model", eos_token_ids=EOS_IDS, vocab_size=128, overrides=overrides
    )


@each_engine
def test_fault_21_25_26_logprobs_are_the_trainers_whatever_happens_to_the_weights(engine: str, models: Path) -> None:
    """At temperature 0.7: before any update, after an ordinary one, after a huge one, after sleep without one."""
    with start_with(engine, models) as workers:
        for lr in (1e-3, 0.3, 0.0):
            rollouts = rollout(workers, temperature=0.7)
            before = trainer_logprobs(workers, rollouts)
            assert gap(workers, rollouts) < TOLERANCE
            if lr:
                with workers.train_phase() as trainer:
                    trainer.supervised_update([[5, 6, 7]], [[8, 9, 1]], lr=lr)
                moved = float((trainer_logprobs(workers, rollouts) - before).abs().max())
                assert moved > (1.0 if lr > 0.1 else 1e-3), "hardly moved: old weights would not be seen"
        again = rollout(workers, temperature=0.7)
        assert again.policy_version == rollouts.policy_version == 2
        assert torch.equal(again.response_tokens, rollouts.response_tokens)
        assert torch.equal(again.rollout_logprobs, rollouts.rollout_logprobs)


@each_engine
def test_fault_15_16_lengths_masks_and_finish_reasons(engine: str, model: Path) -> None:
    """Any EOS token ends a response, and is its last one, the pad token among them. The limit may be a single token."""
    with start_with(engine, model) as workers, workers.rollout_phase() as phase:
        reasons: set[str] = set()
        last: set[int] = set()
        for limit in (1, 8):
            rollouts = phase.generate(prompts_of(workers), n=8, max_response_length=limit, step=limit)
            assert len(rollouts) == 32
            assert rollouts.response_tokens.shape[1] <= limit
            for row in range(len(rollouts)):
                length = int(rollouts.response_lengths[row])
                tokens = rollouts.response_tokens[row, :length].tolist()
                assert rollouts.response_mask[row].tolist() == [
                    at < length for at in range(rollouts.response_mask.shape[1])
                ]
                assert not set(tokens[:-1]) & set(EOS_IDS)
                ended = tokens[-1] in EOS_IDS
                assert rollouts.finish_reasons[row] == ("stop" if ended else "length")
                assert ended or length == limit
                assert rollouts.texts[row] == workers.tokenizer.decode(
                    tokens[:-1] if ended else tokens, skip_special_tokens=True
                )
                reasons.add(rollouts.finish_reasons[row])
                last.add(tokens[-1])
        assert reasons == {"stop", "length"}
        assert PAD_ID in last


@each_engine
def test_fault_19_responses_of_nothing_but_eos(engine: str, tmp_path: Path) -> None:
    """Their one token enters the loss; a step of nothing else is trained on like any other."""
    folder = folder_of(tmp_path / "model", eos_token_ids=range(104))
    with start_with(engine, folder) as workers:
        rollouts = rollout(workers)
        assert set(rollouts.texts) == {""}
        assert set(rollouts.finish_reasons) == {"stop"}
        assert rollouts.response_mask.tolist() == [[True]] * len(rollouts)
        assert gap(workers, rollouts) < TOLERANCE
        with workers.train_phase() as trainer:
            update = trainer.update(rollouts, contrast(rollouts), trainer.old_logprobs(rollouts))
    assert update.num_updates == 1
    assert 0 < update.grad_norm < math.inf


@each_engine
def test_the_last_position_is_used_and_no_other(engine: str, tmp_path: Path) -> None:
    """Prompt and response fill the model's positions, and vLLM's max_model_len, to the last one."""
    longest = LENGTHS["max_prompt_length"]
    positions = longest + MAX_RESPONSE_LENGTH
    folder = folder_of(tmp_path / "model", overrides={**SIZE, "max_position_embeddings": positions})
    with start_with(engine, folder) as workers, workers.rollout_phase() as phase:
        prompts = [td.Prompt(tuple(5 + at % 90 for at in range(longest)), "")]
        rollouts = phase.generate(prompts, n=8, step=1)
        at_the_limit = rollouts.response_lengths == MAX_RESPONSE_LENGTH
        assert at_the_limit.any()
        for reason, is_at_the_limit in zip(rollouts.finish_reasons, at_the_limit.tolist(), strict=True):
            assert reason == "stop" or is_at_the_limit
        one = phase.generate([td.Prompt((*prompts[0].tokens, *range(5, 20)), "")], n=4, max_response_length=1, step=1)
        assert one.response_lengths.tolist() == [1] * 4
        with pytest.raises(ModelError, match=f"may take {positions + 1} tokens"):
            phase.generate(prompts, n=1, max_response_length=MAX_RESPONSE_LENGTH + 1, step=1)
    assert gap(workers, rollouts) < TOLERANCE
    assert gap(workers, one) < TOLERANCE


@each_engine
def test_stop_strings_cut_the_text_and_keep_the_tokens(engine: str, model: Path) -> None:
    stop = ("a", "b", "c", "1", "2", "3")
    with start_with(engine, model, {"rollout": {"stop": stop}}) as workers:
        rollouts = rollout(workers, n=16, temperature=1.0)
        assert gap(workers, rollouts) < TOLERANCE
        stopped = 0
        for row in range(len(rollouts)):
            tokens = rollouts.response_tokens[row, : rollouts.response_lengths[row]].tolist()
            text = workers.tokenizer.decode(tokens[:-1] if tokens[-1] in EOS_IDS else tokens, skip_special_tokens=True)
            found = [text.index(string) for string in stop if string in text]
            assert rollouts.texts[row] == text[: min(found, default=len(text))]
            if found:
                assert rollouts.finish_reasons[row] == "stop"
                assert min(found) == len(text) - 1, "it went on after the stop string"
                stopped += 1
        assert stopped > 5


@each_engine
def test_greedy_tokens_equal_those_of_transformers(engine: str, model: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model)
    with start_with(engine, model) as workers, workers.rollout_phase() as phase:
        prompts = prompts_of(workers)
        rollouts = phase.generate(prompts, n=1, max_response_length=12, temperature=0.0, step=1)
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([prompt.tokens])
            expected = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=list(EOS_IDS),
            )
            tokens = rollouts.response_tokens[row, : rollouts.response_lengths[row]]
            assert tokens.tolist() == expected[0, len(prompt.tokens) :].tolist()
        assert gap(workers, rollouts) < TOLERANCE


@each_engine
def test_fault_12_20_what_was_sampled_is_what_is_trained_on(engine: str, model: Path) -> None:
    """Tokens that decode to nothing among them: their ids count. On policy every ratio is exactly 1."""
    with start_with(engine, model, {"algorithm": {"old_logprobs": "update"}}) as workers:
        rollouts = rollout(workers, n=32, temperature=1.5)
        assert int(rollouts.response_tokens.max()) >= len(workers.tokenizer), "none without a text"
        assert gap(workers, rollouts) < TOLERANCE
        with workers.train_phase() as trainer:
            update = trainer.update(rollouts, contrast(rollouts), trainer.old_logprobs(rollouts))
    assert update.ratio_mean == update.ratio_max == 1.0


@each_engine
@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.5}], ids=["top_k", "top_p"])
def test_fault_22_a_cut_distribution_is_sampled_and_the_full_one_trained(
    engine: str, model: Path, cut: dict[str, float]
) -> None:
    with pytest.raises(td.ConfigError, match="old log-probs must be recomputed"):
        start_with(engine, model, {"rollout": cut, "algorithm": {"old_logprobs": "rollout"}})
    with start_with(engine, model, {"rollout": cut}) as workers:
        rollouts = rollout(workers, temperature=1.0)
        with workers.train_phase() as trainer:
            old = trainer.old_logprobs(rollouts)
            assert old is not None
            assert torch.equal(old, trainer_logprobs(workers, rollouts))
        for row in range(len(rollouts)):
            prompt, length = rollouts.prompt_of(row).tokens, int(rollouts.response_lengths[row])
            tokens = rollouts.response_tokens[row, :length]
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *tokens.tolist()]])
                scores = full_scores(workers, ids)[len(prompt) - 1 : -1]
            at = scores.gather(1, tokens[:, None])
            likelier = scores > at + 1e-4
            if "top_k" in cut:
                assert int(likelier.sum(1).max()) < 3
            else:
                assert float((scores.exp() * likelier).sum(1).max()) < 0.5 + 1e-4


def full_scores(workers: td.Workers, ids: torch.Tensor) -> torch.Tensor:
    """Log-softmax of plain transformers on the weights as they are."""
    plain = AutoModelForCausalLM.from_config(workers.model.config, attn_implementation="eager")
    plain.load_state_dict(workers.model.state_dict())
    return plain(ids).logits[0].log_softmax(-1)


@each_engine
def test_noise_is_the_responses_own(engine: str, model: Path) -> None:
    """Another batch, the same response; another step or seed, another one. Half read, a phase can end."""
    with start_with(engine, model) as workers:
        with workers.rollout_phase() as phase:
            prompts, settings = prompts_of(workers), {"n": 2, "max_response_length": 8}
            all_four = phase.generate(prompts, step=1, **settings)
            alone = phase.generate(prompts[1:2], step=1, **settings)
            assert alone.texts == all_four.texts[2:4]
            assert phase.generate(prompts, step=2, **settings).texts != all_four.texts
            assert phase.generate(prompts, step=1, seed=5, **settings).texts != all_four.texts
            assert len(set(phase.generate(prompts[:1], step=1, n=8, max_response_length=8).texts)) > 4
            next(phase.stream(prompts, phase.options(step=1, n=8)))
        assert rollout(workers, step=1, n=2, temperature=1.0).texts == all_four.texts


@each_engine
def test_a_stream_left_open_ends_with_its_phase(engine: str, model: Path) -> None:
    with start_with(engine, model) as workers:
        before = rollout(workers)
        with workers.rollout_phase() as phase:
            left = phase.stream(prompts_of(workers), phase.options(step=1, n=4))
            next(left)
            sampling = worker_of(workers).sampling
            inner = sampling.stream(prompts_of(workers), phase.options(step=1, n=4))
            next(inner)
        for stream in (left, inner) if engine == "vllm" else (left,):
            with pytest.raises(PhaseError):
                next(stream)
        assert torch.equal(rollout(workers).rollout_logprobs, before.rollout_logprobs)


@each_engine
def test_what_cannot_be_answered_is_refused(engine: str, model: Path) -> None:
    with start_with(engine, model) as workers:
        prompts = prompts_of(workers)
        sampling = worker_of(workers).sampling
        with workers.rollout_phase() as phase:
            options = phase.options(step=1)
            with pytest.raises(DataError, match=r"without a single token, in rows \[1\]"):
                phase.generate([prompts[0], td.Prompt((), "")], step=1)
            with pytest.raises(ModelError, match="may take 600 tokens"):
                phase.generate([td.Prompt((5,) * 100, "")], max_response_length=500, step=1)
        with pytest.raises(PhaseError, match="asleep"):
            sampling.engine.check(prompts, options)


@each_engine
def test_fault_30_no_prompts_make_no_responses(engine: str, model: Path) -> None:
    """As on a rank of several, where there are fewer prompts than ranks."""
    with start_with(engine, model) as workers, workers.rollout_phase() as phase:
        assert len(phase.generate([], step=1)) == 0
        assert len(phase.generate(prompts_of(workers)[:1], n=2, step=1)) == 2


@each_engine
def test_logits_that_are_not_finite_are_told(engine: str, model: Path) -> None:
    with start_with(engine, model) as workers:
        with torch.no_grad():
            workers.model.base_model.norm.weight.fill_(math.inf)
        with pytest.raises(ModelError, match=r"not finite|differ from the trainer's by inf"):
            rollout(workers)


def test_logprobs_of_two_updates_are_not_taken_for_one(model: Path) -> None:
    """The check itself: log-probs of other weights are far outside of the tolerance."""
    with start_with("embedded", model) as workers:
        rollouts = rollout(workers)
        workers._group.call(_disturb)
        assert gap(workers, rollouts) > 100 * TOLERANCE


def _disturb(worker: Worker) -> None:
    with torch.no_grad():
        for parameter in worker.training.policy.model.parameters():
            parameter.mul_(1.01)
