from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import pytest

from tandem.errors import CheckpointError
from tandem.observe.journal import Journal


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond `num_bytes`: to a writer it looks like a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_are_whole_and_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in range(3):
        journal.append({"step": step, "x": step / 3})
    assert lines(journal.path) == [{"step": step, "x": step / 3} for step in range(3)]


def test_not_a_number_is_null_and_what_is_no_json_is_shown(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 1, "a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}, "e": 1 + 2j})
    assert lines(journal.path) == [{"step": 1, "a": None, "b": [None, 1.0], "c": {"d": None}, "e": "(1+2j)"}]


def test_texts_stay_readable_and_half_of_a_surrogate_pair_is_escaped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 1, "text": "é \ud83d"})
    assert lines(journal.path) == [{"step": 1, "text": "é \ud83d"}]
    assert "é \\ud83d" in journal.path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("rest", "kept"),
    [
        ("", 4),
        ('{"step": 4, "x"', 4),  # torn by a kill
        ('{"step": 4}', 4),  # whole, but it was to have a line end
        ("\0\0\0\n", 4),
    ],
)
def test_cut_back_drops_later_steps_and_torn_lines(tmp_path: Path, rest: str, kept: int) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in range(kept):
        journal.append({"step": step})
    before = journal.path.read_bytes()
    journal.path.write_bytes(before + rest.encode())
    journal.cut_back(10)
    assert journal.path.read_bytes() == before
    journal.cut_back(1)
    assert lines(journal.path) == [{"step": 0}, {"step": 1}]
    journal.append({"step": 2})
    assert lines(journal.path)[-1] == {"step": 2}
    journal.cut_back(-1)
    assert journal.path.read_bytes() == b""


def test_values_that_cannot_be_shown_are_written_by_their_type(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    endless: list[object] = [1]
    endless += [endless, endless]
    journal.append({"step": 1, "a": 10**5000, "b": endless, "c": Fraction(10**5000)})
    assert lines(journal.path) == [
        {"step": 1, "a": "<int>", "b": [1, "<list>", "<list>"], "c": "<Fraction>"},
    ]


def test_cut_back_of_nothing(tmp_path: Path) -> None:
    Journal(tmp_path / "metrics.jsonl").cut_back(3)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_fault_41_disk_full_is_a_clear_error_and_earlier_lines_are_intact(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 1})
    before = journal.path.read_bytes()
    with room_for(len(before) + 20), pytest.raises(CheckpointError, match=r"cannot write .*metrics\.jsonl") as error:
        journal.append({"step": 2, "text": "x" * 100})
    assert error.value.remedy is not None
    assert journal.path.read_bytes() == before, "a part of the line went to the disk and was taken back"
    journal.append({"step": 2})
    assert lines(journal.path) == [{"step": 1}, {"step": 2}]


def test_fault_41_a_device_without_room(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left on device"):
        Journal(tmp_path / "metrics.jsonl").append({"step": 1})


def test_fault_41_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file or directory"):
        Journal(tmp_path / "gone" / "metrics.jsonl").append({"step": 1})
