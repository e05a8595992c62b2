"""What the user's code raised, whatever it was."""

from __future__ import annotations

import asyncio
import os
import sysconfig
import traceback
from itertools import groupby
from pathlib import Path
from types import TracebackType

MAX_FRAMES = 8
MAX_CHARACTERS = 4000
# Frames that are not shown: ours, the event loop's, the import system's.
_FOREIGN = (f"{Path(__file__).parent}{os.sep}", f"{Path(asyncio.__file__).parent}{os.sep}", "<frozen ")
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))


class Raised:
    """Describes what the block raised as `text`: a reward function may raise anything, `SystemExit` included.

    The error itself is not kept: its frames hold all that the function had in its hands.

    Two things go on to the caller: running out of memory, after which the process is not fit for another call, and
    being cancelled, which is how a time limit stops a coroutine.
    """

    def __init__(self) -> None:
        self.text: str | None = None

    def __enter__(self) -> Raised:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, MemoryError | asyncio.CancelledError):
            return False
        if error is not None:
            self.text = _described(error)
        return True


def _described(error: BaseException) -> str:
    """The error with the frames of the user's own code, the innermost ones if there are many.

    Of a row of frames within libraries only the innermost one is named.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_FOREIGN)]
    blocks: list[str] = []
    for within_library, row in groupby(frames, key=_is_library):
        *_, innermost = rows = list(row)
        if within_library:
            blocks.append(f'  File "{innermost.filename}", line {innermost.lineno}, in {innermost.name}\n')
        else:
            blocks += traceback.format_list(rows)
    shown = "".join(blocks[-MAX_FRAMES:])
    what = "".join(traceback.format_exception_only(error)).strip()
    if len(what) > MAX_CHARACTERS:
        what = f"{what[:MAX_CHARACTERS]} ... ({len(what)} characters)"
    return f"{what}\n{shown}".rstrip()


def _is_library(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_LIBRARIES) or "site-packages" in Path(frame.filename).parts
