from __future__ import annotations

import os
import pty
from collections.abc import Callable

import pytest

from tandem.observe.output import lasting


@pytest.mark.parametrize("opened", [os.pipe, pty.openpty])
def test_a_reader_that_has_gone_is_no_error_now_or_at_the_end(opened: Callable[[], tuple[int, int]]) -> None:
    reader, writer = opened()
    with open(writer, "w", encoding="utf-8") as stream:
        output = lasting(stream)
        output.write("step 1\n")
        output.flush()
        assert os.read(reader, 64).split() == [b"step", b"1"]
        assert output.isatty() == (opened is pty.openpty)
        os.close(reader)
        for _ in range(3):
            output.write("nobody reads this\n")
            output.flush()
        stream.write("nor does what others write fail\n")
