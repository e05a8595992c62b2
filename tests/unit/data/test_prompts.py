"""The stream of prompt batches: epochs, mixing, resumption; held-out prompts; checks before the start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tandem.batch import Prompt
from tandem.config.data import DataConfig, DataSource
from tandem.data.prompts import Prompts, check_data, load_prompts
from tandem.errors import DataError
from tests.tiny import addition_rows, tiny_tokenizer, write_jsonl, write_verl_parquet

TOKENIZER = tiny_tokenizer()


def write_rows(path: Path, names: Sequence[str]) -> str:
    return str(write_jsonl(path, [{"prompt": name, "answer": name.upper()} for name in names]))


def texts(batches: Sequence[Sequence[Prompt]]) -> list[str]:
    return [prompt.text for batch in batches for prompt in batch]


def numbered(path: Path, count: int) -> str:
    return write_rows(path, [f"row{index}" for index in range(count)])


def test_verl_parquet_as_it_is(tmp_path: Path) -> None:
    path = write_verl_parquet(tmp_path / "train.parquet", addition_rows(4))
    (batch,) = Prompts(path, TOKENIZER, per_step=4, shuffle=False).take(1)
    assert batch[3] == Prompt(
        tokens=tuple(TOKENIZER("user: What is 3 + 3?\nassistant: ")["input_ids"]),
        text="user: What is 3 + 3?\nassistant: ",
        ground_truth="6",
        data_source="addition",
        extra_info={"index": 3, "split": "train"},
        prompt_id=3,
    )


def test_every_row_once_per_epoch_and_batches_flow_across(tmp_path: Path) -> None:
    prompts = Prompts(numbered(tmp_path / "a.jsonl", 10), TOKENIZER, per_step=4)
    drawn = texts(list(prompts.take(5)))
    assert len(drawn) == 20
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == [f"row{index}" for index in range(10)]
    assert drawn[:10] != drawn[10:]
    assert prompts.epoch == 2.0


def test_steps_cover_the_epochs(tmp_path: Path) -> None:
    prompts = Prompts(numbered(tmp_path / "a.jsonl", 10), TOKENIZER, per_step=4)
    assert [len(prompts), *(prompts.steps_for(epochs) for epochs in (1, 2, 3))] == [10, 3, 5, 8]


def test_each_draw_has_an_id_of_its_own(tmp_path: Path) -> None:
    prompts = Prompts(numbered(tmp_path / "a.jsonl", 3), TOKENIZER, per_step=2)
    assert [prompt.prompt_id for batch in prompts.take(4) for prompt in batch] == list(range(8))


def test_seed_decides_the_order(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 20)
    first = [prompt.text for prompt in Prompts(path, TOKENIZER, per_step=20, seed=1).next_batch()]
    assert first == [prompt.text for prompt in Prompts(path, TOKENIZER, per_step=20, seed=1).next_batch()]
    assert first != [prompt.text for prompt in Prompts(path, TOKENIZER, per_step=20, seed=2).next_batch()]


def test_without_shuffle_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    prompts = Prompts(numbered(tmp_path / "a.jsonl", 3), TOKENIZER, per_step=3, shuffle=False)
    assert texts(list(prompts.take(2))) == ["row0", "row1", "row2"] * 2


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    small, large = write_rows(tmp_path / "s.jsonl", ["s0", "s1"]), numbered(tmp_path / "l.jsonl", 30)
    sources = [DataSource(path=small, weight=1.0), DataSource(path=large, weight=3.0)]
    for batch in Prompts(sources, TOKENIZER, per_step=8).take(6):
        assert sum(prompt.text.startswith("s") for prompt in batch) == 2


def test_max_rows_takes_the_first_of_each_source(tmp_path: Path) -> None:
    paths = [numbered(tmp_path / "a.jsonl", 10), write_rows(tmp_path / "b.jsonl", ["b0", "b1", "b2"])]
    sources = [DataSource(path=path) for path in paths]
    (batch,) = Prompts(sources, TOKENIZER, per_step=4, max_rows=2).take(1)
    assert sorted(prompt.text for prompt in batch) == ["b0", "b1", "row0", "row1"]


def test_max_rows_bounds_an_endless_generator(tmp_path: Path) -> None:
    path = tmp_path / "sums.py"
    path.write_text("def rows(seed):\n    while True:\n        yield {'prompt': f'{seed}', 'answer': 1}\n")
    assert [p.text for p in Prompts(f"{path}:rows", TOKENIZER, per_step=3, seed=5, max_rows=3).next_batch()] == [
        "5"
    ] * 3


@pytest.mark.parametrize("position", range(7))
def test_resumed_stream_goes_on_exactly(tmp_path: Path, position: int) -> None:
    sources = [
        DataSource(path=numbered(tmp_path / "a.jsonl", 9), weight=0.7),
        DataSource(path=write_rows(tmp_path / "b.jsonl", ["b0", "b1"]), weight=0.3),
    ]
    straight = Prompts(sources, TOKENIZER, per_step=4, seed=3)
    list(straight.take(position))
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = Prompts(sources, TOKENIZER, per_step=4, seed=3)
    resumed.load_state_dict(state)
    assert list(resumed.take(8)) == list(straight.take(8))


def test_fault_39_saved_at_the_last_step_of_an_epoch(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 8)
    straight = Prompts(path, TOKENIZER, per_step=4)
    first_epoch = texts(list(straight.take(2)))
    resumed = Prompts(path, TOKENIZER, per_step=4)
    resumed.load_state_dict(straight.state_dict())
    second_epoch = texts(list(resumed.take(2)))
    assert second_epoch == texts(list(straight.take(2)))
    assert sorted(second_epoch) == sorted(first_epoch)
    assert second_epoch != first_epoch


def test_a_new_batch_size_goes_on_at_the_same_row(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 12)
    order = texts(list(Prompts(path, TOKENIZER, per_step=12).take(1)))
    before, after = Prompts(path, TOKENIZER, per_step=4), Prompts(path, TOKENIZER, per_step=2)
    before.next_batch()
    after.load_state_dict(before.state_dict())
    assert texts(list(after.take(4))) == order[4:]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"max_rows": 5}, "rows"),
        ({"chat_template": "always"}, "tokens"),
    ],
)
def test_resuming_with_other_data_is_an_error_unless_allowed(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    path = numbered(tmp_path / "a.jsonl", 6)
    saved = Prompts(path, TOKENIZER, per_step=3)
    saved.next_batch()
    other = Prompts(path, TOKENIZER, per_step=3, **change)
    with pytest.raises(DataError, match=rf"{named}.* changed(.|\n)*run\.allow_changes=true"):
        other.load_state_dict(saved.state_dict())
    other.load_state_dict(saved.state_dict(), allow_changes=True)
    batch = other.next_batch()
    assert [prompt.prompt_id for prompt in batch] == [3, 4, 5]
    fresh = Prompts(path, TOKENIZER, per_step=3, **change).next_batch()
    assert [prompt.text for prompt in batch] == [prompt.text for prompt in fresh]


def test_resuming_with_other_ground_truths_is_an_error() -> None:
    def stream(truth: str) -> Prompts:
        return Prompts([{"prompt": "1+1=", "answer": truth}], TOKENIZER, per_step=1)

    state = json.loads(json.dumps(stream("2").state_dict()))
    stream("2").load_state_dict(state)
    with pytest.raises(DataError, match="started with: ground truths changed"):
        stream("3").load_state_dict(state)


@pytest.mark.parametrize(
    ("prompt", "mode", "expected"),
    [
        ("1+1=", "auto", True),
        ("1+1=", "never", False),
        ("1+1=", "always", False),
        ([{"role": "user", "content": "1+1?"}], "auto", False),
    ],
)
def test_texts_that_pass_a_chat_template_over_are_known(prompt: object, mode: str, *, expected: bool) -> None:
    rows = [{"prompt": prompt, "answer": 2}]
    assert Prompts(rows, TOKENIZER, per_step=1, chat_template=mode).has_raw_despite_template is expected


def test_texts_without_a_chat_template_pass_nothing_over() -> None:
    rows, bare = [{"prompt": "1+1=", "answer": 2}], tiny_tokenizer(chat_template=None)
    assert not Prompts(rows, bare, per_step=1).has_raw_despite_template


def test_resuming_with_other_weights_does_not_make_up_for_the_past(tmp_path: Path) -> None:
    paths = [numbered(tmp_path / "a.jsonl", 8), write_rows(tmp_path / "b.jsonl", [f"b{index}" for index in range(8)])]

    def stream(weight: float) -> Prompts:
        sources = [DataSource(path=paths[0], weight=1.0), DataSource(path=paths[1], weight=weight)]
        return Prompts(sources, TOKENIZER, per_step=4)

    saved, other = stream(1.0), stream(3.0)
    list(saved.take(10))
    with pytest.raises(DataError, match="weights changed"):
        other.load_state_dict(saved.state_dict())
    other.load_state_dict(saved.state_dict(), allow_changes=True)
    assert sum(prompt.text.startswith("b") for prompt in other.next_batch()) == 3


def test_from_config_hands_on_every_key(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"q": "123456789"[:size], "truth": {"value": size}, "origin": "o"} for size in range(1, 10)]
    write_jsonl(path, rows)
    config = DataConfig(
        train=(DataSource(path=str(path)),),
        prompts_per_step=2,
        prompt_key="q",
        truth_key="truth.value",
        source_key="origin",
        chat_template="always",
        chat_template_options={"enable_thinking": False},
        system_prompt="s",
        max_prompt_length=len("system: s\nuser: 123\nassistant: (no thinking) "),
        over_length="filter",
        shuffle=False,
        max_rows=5,
    )
    prompts = Prompts.from_config(config, TOKENIZER)
    first, second = prompts.next_batch()
    assert first.text == "system: s\nuser: 1\nassistant: (no thinking) "
    assert (second.ground_truth, second.data_source) == (2, "o")
    assert (len(prompts), prompts.num_dropped, len(prompts.next_batch())) == (3, 2, 2)
    shuffled = config.model_copy(update={"shuffle": True})
    seeds = [Prompts.from_config(shuffled, TOKENIZER, seed=seed) for seed in range(4)]
    assert len({tuple(texts(list(stream.take(3)))) for stream in seeds}) > 1


def test_more_prompts_per_step_than_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ["a", "b", "long"])
    with pytest.raises(DataError) as caught:
        Prompts(path, TOKENIZER, per_step=3, max_prompt_length=2)
    assert "data.prompts_per_step=3, but there are only 2 prompts (1 more are over the length limit)" in str(
        caught.value
    )
    assert "at most 2" in str(caught.value)


def test_everything_filtered_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ["abc", "def"])
    with pytest.raises(DataError, match=r"all 2 prompts have more tokens than data\.max_prompt_length=2"):
        Prompts(path, TOKENIZER, per_step=1, max_prompt_length=2)


def test_options_out_of_range_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(ValidationError, match="prompts_per_step"):
        Prompts(path, TOKENIZER, per_step=0)
    with pytest.raises(ValueError, match="non-negative"):
        Prompts(path, TOKENIZER, per_step=1, seed=-1).next_batch()


def test_fault_37_faults_of_all_files_come_at_once(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.jsonl", ["a"])
    nameless = str(write_jsonl(tmp_path / "nameless.jsonl", [{"question": "a", "answer": "b"}]))
    mixed = str(write_jsonl(tmp_path / "mixed.jsonl", [{"prompt": 1, "answer": "b"}, {"prompt": "c", "label": "d"}]))
    paths = [good, nameless, mixed, str(tmp_path / "absent.jsonl")]
    with pytest.raises(DataError) as caught:
        Prompts([DataSource(path=path) for path in paths], TOKENIZER, per_step=1)
    message = str(caught.value)
    assert "nameless.jsonl, line 1: no column 'prompt'; the columns are question, answer" in message
    assert "mixed.jsonl, line 1: a prompt is a text or a list of messages, this is of type int" in message
    assert "mixed.jsonl, line 2: no ground truth" in message
    assert "absent.jsonl: no such file" in message
    assert "good.jsonl" not in message


def test_check_data_finds_faults_without_a_tokenizer(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.jsonl", ["a"])
    nameless = str(write_jsonl(tmp_path / "nameless.jsonl", [{"question": "a"}]))
    check_data(DataConfig(train=good), [good])
    with pytest.raises(DataError) as caught:
        check_data(DataConfig(train=nameless), [good, str(tmp_path / "absent.parquet")])
    assert "no column 'prompt'" in str(caught.value)
    assert "absent.parquet: no such file" in str(caught.value)
    with pytest.raises(DataError, match=r"data\.train is not set"):
        check_data(DataConfig())


def test_held_out_prompts_are_all_there_in_their_order(tmp_path: Path) -> None:
    path = numbered(tmp_path / "test.jsonl", 5)
    held_out = load_prompts(path, TOKENIZER, DataConfig(max_rows=2, chat_template="always"))
    assert [prompt.text for prompt in held_out] == [f"user: row{index}\nassistant: " for index in range(5)]
    assert [prompt.prompt_id for prompt in held_out] == [0, 1, 2, 3, 4]
    assert load_prompts(path, TOKENIZER)[1].ground_truth == "ROW1"


def test_rows_may_be_given_as_such() -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    for source in (rows, iter(rows), lambda: rows):
        (batch,) = Prompts(source, TOKENIZER, per_step=2, shuffle=False).take(1)
        assert [(prompt.text, prompt.ground_truth) for prompt in batch] == [("1+1=", "2"), ("2+2=", "4")]
    assert [prompt.text for prompt in load_prompts(rows, TOKENIZER)] == ["1+1=", "2+2="]


def test_a_function_that_makes_rows_gets_the_seed_it_asks_for() -> None:
    def numbers(seed: int) -> Iterator[dict[str, str]]:
        yield {"prompt": str(seed)}

    (batch,) = Prompts(numbers, TOKENIZER, per_step=1, seed=7, truth_key="none").take(1)
    assert batch[0].text == "7"


def test_given_rows_and_a_file_of_the_same_are_one_stream(tmp_path: Path) -> None:
    rows = [{"prompt": f"row{index}", "answer": "x"} for index in range(6)]
    given = Prompts(rows, TOKENIZER, per_step=4)
    read = Prompts(write_jsonl(tmp_path / "rows.jsonl", rows), TOKENIZER, per_step=4)
    read.load_state_dict(given.state_dict())
    assert list(given.take(3)) == list(read.take(3))


def test_given_rows_that_cannot_be_used_say_which() -> None:
    def needs_level(level: int) -> list[dict[str, str]]:
        return [{"prompt": str(level)}]

    def nothing() -> list[dict[str, str]]:
        return []

    for source, message in (
        ([], "given data: it has no rows"),
        (["a.parquet"], "given data, row 1: a row is a mapping"),
        ([{"prompt": "1"}, {"text": "2"}], "given data, row 2: "),
        (needs_level, "needs_level asks for level"),
        (nothing, "nothing: it has no rows"),
    ):
        with pytest.raises(DataError, match=message):
            Prompts(source, TOKENIZER, per_step=1, truth_key="none")
