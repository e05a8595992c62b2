from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.errors import CheckpointError
from tandem.observe.curve import draw_curves, moving_mean, read_metrics


def write_run(folder: Path, gain: float) -> Path:
    folder.mkdir()
    rows = [{"step": 0, "eval/pass@1": 0.2, "eval/pass@1_stderr": 0.02}]
    rows += [
        {
            "step": step,
            "reward/mean": None if step == 3 else gain * step,
            **({"eval/pass@1": gain * step} if step == 5 else {}),
        }
        for step in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_the_picture_names_the_runs_and_the_axes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib as mpl

    picture = tmp_path / "docs" / "curve.svg"
    runs = {"seed 0": write_run(tmp_path / "a", 0.1), "seed 1": write_run(tmp_path / "b", 0.2)}
    with mpl.rc_context({"svg.fonttype": "none"}):  # text as text, so that it can be read here
        draw_curves(runs, picture)
    text = picture.read_text()
    for label in ("seed 0", "seed 1", "held-out pass@1", "training reward", "step"):
        assert label in text


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_curves({"one": write_run(tmp_path / "a", 0.1)}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_metrics(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="is empty"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("PK\x03\x04")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_metrics(tmp_path)


def test_moving_mean() -> None:
    assert moving_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
