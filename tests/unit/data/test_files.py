"""Rows from parquet, jsonl, folders, datasets laid out like the hub's, and generators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.data.files import read_rows
from tandem.errors import DataError
from tests.tiny import addition_rows, write_jsonl, write_verl_parquet


def values(path: Path | str, *, seed: int = 0) -> list[dict[str, Any]]:
    return [dict(row.values) for row in read_rows(str(path), seed=seed)]


def error_of(path: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        list(read_rows(str(path)))
    return str(caught.value)


def write_generator(path: Path, body: str) -> Path:
    path.write_text(f"def rows{body}\n", encoding="utf-8")
    return path


def test_parquet_gives_nested_columns_as_plain_python(tmp_path: Path) -> None:
    rows = addition_rows(3)
    assert values(write_verl_parquet(tmp_path / "train.parquet", rows)) == rows


def test_parquet_rows_are_numbered_across_its_batches(tmp_path: Path) -> None:
    path = tmp_path / "long.parquet"
    pq.write_table(pa.table({"prompt": [str(index) for index in range(2500)]}), path)
    rows = list(read_rows(str(path)))
    assert rows[2100].values == {"prompt": "2100"}
    assert rows[2100].place == f"{path}, row 2101"


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_jsonl_keeps_types_and_counts_empty_lines(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('\ufeff{"prompt": "é", "answer": 4}\n\n{"prompt": "b", "answer": [[1], null]}\n', encoding="utf-8")
    rows = list(read_rows(str(path)))
    assert [row.values for row in rows] == [{"prompt": "é", "answer": 4}, {"prompt": "b", "answer": [[1], None]}]
    assert rows[1].place == f"{path}, line 3"


def test_folder_reads_its_data_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "part-2.jsonl", [{"prompt": "c"}])
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "part-1.parquet")
    (tmp_path / "README.md").write_text("not data", encoding="utf-8")
    assert [row["prompt"] for row in values(tmp_path)] == ["a", "b", "c"]


def test_folder_of_several_splits_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a"}])
    write_jsonl(tmp_path / "test.jsonl", [{"prompt": "b"}])
    message = error_of(tmp_path)
    assert "test, train" in message
    assert f"{tmp_path}:test" in message


def test_dataset_by_split_of_a_local_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "sums"
    write_jsonl(folder / "train.jsonl", [{"prompt": "a", "answer": [1]}])
    write_jsonl(folder / "test.jsonl", [{"prompt": "b", "answer": [2]}])
    assert values(f"{folder}:test") == [{"prompt": "b", "answer": [2]}]
    assert values(f"{folder}:default:train") == [{"prompt": "a", "answer": [1]}]
    assert "Unknown split" in error_of(f"{folder}:validation")


def test_generator_is_called_with_the_seed_it_asks_for(tmp_path: Path) -> None:
    path = write_generator(
        tmp_path / "sums.py", "(seed, n=2):\n    return ({'prompt': f'{seed}-{i}'} for i in range(n))"
    )
    assert values(f"{path}:rows", seed=7) == [{"prompt": "7-0"}, {"prompt": "7-1"}]


def test_generator_without_parameters_hands_on_its_objects_untouched(tmp_path: Path) -> None:
    body = "():\n    import numpy\n    yield {'prompt': 'a', 'answer': numpy.array([1, 2])}"
    (row,) = values(f"{write_generator(tmp_path / 'arrays.py', body)}:rows")
    assert type(row["answer"]).__name__ == "ndarray"
    assert row["answer"].tolist() == [1, 2]


def test_generator_file_may_define_dataclasses_and_take_any_keywords(tmp_path: Path) -> None:
    path = tmp_path / "shapes.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import asdict, dataclass\n"
        "@dataclass\n"
        "class Sum:\n"
        "    prompt: str\n"
        "def rows(*parts, **options):\n"
        "    return [asdict(Sum(f'{parts}{options}'))]\n",
        encoding="utf-8",
    )
    assert values(f"{path}:rows") == [{"prompt": "(){}"}]


def test_generator_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_sums.py").write_text("PROMPT = '1+1='", encoding="utf-8")
    path = tmp_path / "sums.py"
    path.write_text("from neighbour_of_sums import PROMPT\ndef rows(): yield {'prompt': PROMPT}", encoding="utf-8")
    before = list(sys.path)
    assert values(f"{path}:rows") == [{"prompt": "1+1="}]
    assert sys.path == before


def test_generator_is_read_lazily(tmp_path: Path) -> None:
    body = "():\n    i = 0\n    while True:\n        yield {'prompt': str(i)}\n        i += 1"
    rows = read_rows(f"{write_generator(tmp_path / 'endless.py', body)}:rows")
    assert [next(rows).values["prompt"] for _ in range(3)] == ["0", "1", "2"]


def test_generator_that_cannot_be_called_says_why(tmp_path: Path) -> None:
    path = write_generator(tmp_path / "bad.py", "(level):\n    yield {}\ndef plain():\n    return 4")
    assert "asks for level" in error_of(f"{path}:rows")
    assert "returned int" in error_of(f"{path}:plain")
    assert "it has: plain, rows" in error_of(f"{path}:missing")
    assert "cannot be read" in error_of(f"{tmp_path / 'absent.py'}:rows")


def test_errors_inside_a_generator_come_through_as_they_are(tmp_path: Path) -> None:
    path = write_generator(tmp_path / "raises.py", "():\n    open('/nonexistent/file')\n    yield {}")
    with pytest.raises(FileNotFoundError, match="/nonexistent/file"):
        list(read_rows(f"{path}:rows"))


def test_fault_37_missing_file(tmp_path: Path) -> None:
    for name in ("absent.parquet", "absent.jsonl", "absent.csv", "very/deep/absent"):
        message = error_of(tmp_path / name)
        assert f"{tmp_path / name}: no such file" in message
        assert str(Path.cwd()) in message


def test_fault_37_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    (tmp_path / "b.jsonl").write_text("\n\n", encoding="utf-8")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "c.parquet")
    (tmp_path / "folder").mkdir()
    assert "a.parquet: the file is empty" in error_of(tmp_path / "a.parquet")
    assert "b.jsonl: it has no rows" in error_of(tmp_path / "b.jsonl")
    assert "c.parquet: it has no rows" in error_of(tmp_path / "c.parquet")
    assert "no data files" in error_of(tmp_path / "folder")


def test_fault_37_not_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_text(json.dumps({"prompt": "a"}), encoding="utf-8")
    assert f"{path}: not a parquet file" in error_of(path)


def test_fault_37_parquet_file_cut_off(tmp_path: Path) -> None:
    path = write_verl_parquet(tmp_path / "train.parquet", addition_rows(50))
    path.write_bytes(path.read_bytes()[:-20])
    assert str(path) in error_of(path)


def test_fault_37_wrong_format(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("prompt\na\n", encoding="utf-8")
    message = error_of(path)
    assert "unknown format .csv" in message
    assert ".jsonl, .parquet" in message


def test_fault_37_jsonl_with_a_broken_line_or_a_row_of_a_wrong_type(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n', encoding="utf-8")
    assert f"{path}, line 2: not JSON" in error_of(path)
    path.write_text('{"prompt": "a"}\n["b"]\n', encoding="utf-8")
    assert f"{path}, line 2: a row is a mapping of columns to values, this is of type list" in error_of(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in error_of(path)


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read everything; as another user the permission bits count."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_fault_37_file_without_read_permission(suffix: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / f"train{suffix}"
        path.write_text('{"prompt": "a"}', encoding="utf-8")
        path.chmod(0)
        with without_privileges():
            message = error_of(path)
    assert f"{path}: cannot be read" in message
    assert "permissions" in message


def test_fault_37_folder_without_permission() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "closed"
        path = write_jsonl(folder / "train.jsonl", [{"prompt": "a"}])
        folder.chmod(0)
        try:
            with without_privileges():
                message, message_of_folder = error_of(path), error_of(folder)
        finally:
            folder.chmod(0o755)
    assert f"{path}: cannot be read" in message
    assert f"{folder}: cannot be read" in message_of_folder


def test_reading_files_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, tandem.data.files; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 200_000 + "]" * 200_000])
def test_fault_37_jsonl_with_a_value_that_python_cannot_read(value: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n{"prompt": ' + value + "}\n")
    assert f"{path}, line 2: cannot be read" in error_of(path)
