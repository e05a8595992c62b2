"""The recorded values of verl 0.9.1: tests/vectors/verl.json, and the batch that they were computed from."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

RECORD = json.loads((Path(__file__).parents[1] / "vectors" / "verl.json").read_text(encoding="utf-8"))
VECTORS = {vector["id"]: vector for vector in RECORD["vectors"]}

# verl adds 1e-8 to the denominators of its means and ratios of counts, and takes some sums in float32.
CLOSE = {"rtol": 3e-8, "atol": 1e-9}
CLOSE_FLOAT32 = {"rtol": 1e-6, "atol": 1e-6}

AGGREGATION = {  # verl's name -> ours
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
    "seq-mean-token-mean": "sequence_mean",
}


def tensor(recorded: dict) -> Tensor:
    dtype = {"float64": torch.float64, "float32": torch.float32, "int64": torch.int64}[recorded["dtype"]]
    flat = torch.tensor([float(x) for x in _flatten(recorded["data"])], dtype=torch.float64)
    return flat.to(dtype).reshape(recorded["shape"])


def _flatten(data: object) -> list:
    return [x for item in data for x in _flatten(item)] if isinstance(data, list) else [data]


def batch(name: str) -> Tensor:
    return tensor(RECORD["inputs"][name])


def literal(vector: dict) -> dict:
    return vector["inputs"].get("literal", {})


MASK = batch("response_mask").bool()
GROUP_IDS = torch.tensor(["abc".index(uid) for uid in RECORD["inputs"]["uid"]])


def same_group(row: int) -> Tensor:
    return GROUP_IDS.eq(GROUP_IDS[row])


def family(prefix: str) -> tuple[str, ...]:
    return tuple(name for name in VECTORS if name.startswith(prefix))
