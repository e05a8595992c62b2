"""Stop strings, in text whose tokens are several characters long."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.rollout.stop import StopStrings

PIECES = ["Ans", "wer", ": 4", "2\n", "\nQ", "x"]


def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(PIECES[token] for token in tokens) for tokens in sequences]


def test_a_stop_string_that_spans_tokens_is_found() -> None:
    stop = StopStrings(("\n\n", "END"), decode)
    assert stop.found([[0, 1, 2, 3], [0, 1, 2, 3, 4], [5]]) == [False, True, False]
    assert stop.window >= 4


def test_text_is_cut_at_the_first_stop_string() -> None:
    stop = StopStrings(("42", "wer"), decode)
    assert stop.cut("Answer: 42\n") == ("Ans", True)
    assert stop.cut("nothing") == ("nothing", False)


def test_without_stop_strings_nothing_is_to_be_done() -> None:
    assert not StopStrings((), decode)
    assert StopStrings(("a",), decode)
