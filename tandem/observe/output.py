"""Standard streams whose reader may go away before the run has ended: a closed terminal, the end of `| head`."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO, cast


class Output:
    """Writes to a stream for as long as that works, and then goes on silently: what is shown is on disk as well."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        """Write `text` if it can be written."""
        try:
            self._stream.write(text)
        except OSError:
            self._leave()
        return len(text)

    def flush(self) -> None:
        """Hand over what was written if that goes."""
        try:
            self._stream.flush()
        except OSError:
            self._leave()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Its descriptor."""
        return self._stream.fileno()

    def _leave(self) -> None:
        """Nobody reads: what is still buffered must not fail again when Python flushes its streams at the end."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def lasting(stream: TextIO) -> TextIO:
    """The stream, whose writes do not fail any more."""
    return cast("TextIO", Output(stream))
