"""The wish that a run ends early."""

from __future__ import annotations

import threading


class Stop(threading.Event):
    """Set it from elsewhere, such as a signal handler, to end a run after the step under way, with a checkpoint.

    `steps_begun` says whether there is such a step: before, nothing would be lost by leaving at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps_begun = False
