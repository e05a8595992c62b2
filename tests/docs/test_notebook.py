"""examples/notebook.ipynb runs from top to bottom, and the model in it learns."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
REWARD = re.compile(r"^step +\d+  reward (\d\.\d\d)", re.MULTILINE)


@pytest.mark.slow
def test_the_notebook_runs_and_both_of_its_loops_learn(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    text = "\n".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    rewards = [float(reward) for reward in REWARD.findall(text)]
    assert len(rewards) == 5
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.6
    own_loop = re.search(r"^reward (\d\.\d\d) -> (\d\.\d\d)", text, re.MULTILINE)
    assert own_loop is not None
    assert float(own_loop[2]) > float(own_loop[1])
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
