"""Prompts are shared out, and every one is answered once."""

from __future__ import annotations

import pytest

from tandem.batch import Prompt, Response
from tandem.errors import DataError, ModelError, PhaseError
from tandem.model.attention import register
from tandem.model.ranks import ALONE, Ranks
from tandem.rollout.embedded import EmbeddedEngine
from tandem.rollout.options import SamplingOptions
from tandem.rollout.replicas import ReplicatedEngine
from tests.tiny import tiny_model, tiny_tokenizer

register()
TOKENIZER = tiny_tokenizer()
OPTIONS = SamplingOptions(n=2, max_response_length=8)


@pytest.fixture(scope="module")
def engine() -> EmbeddedEngine:
    return EmbeddedEngine(tiny_model(attention="tandem"), TOKENIZER, eos_ids=[1], max_concurrent=8)


def prompts_of(count: int) -> list[Prompt]:
    texts = [f"{row}+" * (row + 1) for row in range(count)]
    return [Prompt(tuple(TOKENIZER.encode(text)), text, prompt_id=row) for row, text in enumerate(texts)]


def of_rank(engine: EmbeddedEngine, rank: int, size: int, tensor_parallel: int, count: int) -> list[Response]:
    """Groups of a whole model each, so that ranks can be called one after the other."""
    replicated = ReplicatedEngine(engine, Ranks(rank, size, size), tensor_parallel)
    return list(replicated.stream(prompts_of(count), OPTIONS))


def ordered(responses: list[Response]) -> list[Response]:
    return sorted(responses, key=lambda response: (response.group, response.index))


@pytest.mark.parametrize(("size", "tensor_parallel"), [(2, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_fault_30_every_prompt_is_answered_once(
    engine: EmbeddedEngine, size: int, tensor_parallel: int, count: int
) -> None:
    """Also where prompts do not divide among the replicas, or one has none. The answers are those of one engine."""
    responses = [of_rank(engine, rank, size, tensor_parallel, count) for rank in range(size)]
    assert ordered([each for written in responses for each in written]) == ordered(
        list(engine.stream(prompts_of(count), OPTIONS))
    )
    for rank, written in enumerate(responses):
        replica = rank // tensor_parallel
        groups = set(range(replica, count, size // tensor_parallel)) if rank % tensor_parallel == 0 else set()
        assert {response.group for response in written} == groups


def test_alone_it_is_the_engine_itself(engine: EmbeddedEngine) -> None:
    prompts = prompts_of(4)
    assert list(ReplicatedEngine(engine, ALONE).stream(prompts, OPTIONS)) == list(engine.stream(prompts, OPTIONS))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_the_whole_batch_shows_is_raised_on_every_rank(rank: int) -> None:
    """And at once, not when the first response is asked for."""
    engine = EmbeddedEngine(tiny_model(attention="tandem"), TOKENIZER, eos_ids=[1])
    replicated = ReplicatedEngine(engine, Ranks(rank, 3, 3))
    prompts = prompts_of(2)  # rank 2 has none
    with pytest.raises(ModelError, match="may take 1006 tokens"):
        replicated.stream(prompts, SamplingOptions(n=1, max_response_length=1002))
    with pytest.raises(DataError, match=r"rows \[1\] of the batch"):
        replicated.stream([prompts[0], Prompt((), "")], OPTIONS)
    engine.sleep()
    with pytest.raises(PhaseError):
        replicated.stream(prompts, OPTIONS)
