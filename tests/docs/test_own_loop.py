"""examples/own_loop.py, as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
REWARD = re.compile(r"^step +\d+  reward (\d\.\d\d)", re.MULTILINE)


@pytest.mark.slow
def test_own_loop_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    rewards = [float(reward) for reward in REWARD.findall(done.stdout)]
    assert len(rewards) == 40
    assert sum(rewards[:5]) / 5 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.9
    assert list(tmp_path.iterdir()) == []
