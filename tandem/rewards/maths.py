"""Built-in reward for mathematical answers, by math-verify (https://github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import re
from typing import Any

from tandem.rewards.numbers import accepted_answers

# Per expression; math-verify's own bound, by SIGALRM, spares the worker process the kill by `reward.timeout_s`.
TIMEOUT_S = 2

_BRACE = re.compile(r"\\\\|\\[{}]|\\(?:boxed|fbox|framebox)\s*\{|[{}]")
_WORD = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]+)*")


def maths(response: str, ground_truth: Any) -> float:
    r"""1 if the answer in the response is mathematically equal to the ground truth.

    The answer is what the last \boxed{} holds; without a box, what math-verify finds: the last formula or number.
    `10\%` equals both 10 and 0.1. Words in a box are compared as words. A list of ground truths means that each of
    them is right. Needs the main thread, because math-verify stops long calculations by SIGALRM.
    """
    boxes = find_boxes(response)
    answers = [f"\\boxed{{{boxes[-1]}}}"] if boxes else [response]
    if len(boxes) > 1:
        answers.append(", ".join(f"${box}$" for box in boxes))  # an answer of several parts, each in its own box
    return float(any(_equal(truth, answer) for truth in accepted_answers(ground_truth) for answer in answers))


def find_boxes(text: str) -> list[str]:
    r"""What each closed \boxed{} (also \fbox, \framebox) of `text` holds, in the order in which they close."""
    boxes = []
    open_braces: list[int | None] = []  # for each: where a box's content begins, None for any other brace
    for match in _BRACE.finditer(text):
        brace = match[0]
        if brace == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                boxes.append(text[start : match.start()].strip().rstrip(".").rstrip())
        elif brace.endswith("{") and brace != "\\{":
            open_braces.append(None if brace == "{" else match.end())
    return boxes


def _equal(truth: str, answer: str) -> bool:
    from math_verify import parse, verify  # imports sympy: only where it is needed

    boxes = find_boxes(truth)
    truth = boxes[-1] if boxes else truth.strip().strip("$").strip()
    answered = find_boxes(answer)
    said, right = _plain(answered[-1]) if answered else "", _plain(truth)
    if _WORD.fullmatch(right):  # math-verify reads a word as a product of its letters: `seat` would be `east`
        return said.casefold() == right.casefold()
    if said == right:
        return True
    wanted = parse(f"${truth}$", parsing_timeout=TIMEOUT_S)
    found = parse(answer, parsing_timeout=TIMEOUT_S)
    return verify(wanted, found, timeout_seconds=TIMEOUT_S)


def _plain(text: str) -> str:
    r"""The text without \text{}, dollar signs, surplus white space, and brackets around a single letter: (A)."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text).replace("$", "")
    return re.sub(r"\A\((\w)\)\Z", r"\1", " ".join(text.split()))
