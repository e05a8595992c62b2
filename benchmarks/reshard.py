"""What it takes to bring the trainer's weights to the engine: seconds, bytes, memory.

    python -m benchmarks.reshard [MODEL_FOLDER] [--ranks 2] [--tensor-parallel 1] [--dtype float32]

Three ways alternate in one run, and of each the median counts:

    reshard           Tandem's: FSDP shards to the engine's slices, bucket by bucket
    gather            every rank makes all tensors whole and keeps them; cutting and copying them is not counted
    raw all-gather    a single collective that moves as many bytes as the reshard, in buffers that are already there
    raw all-to-all    likewise, by the collective that the reshard uses

Weights are random and of the model's shapes: only its config is read, and nothing is computed with it, so the
tensor-parallel size may be one that its heads do not allow. On CPUs memory is what the process has resident at its
peak, less what it had before; on GPUs what PyTorch has allocated. CPU seconds are those of one rank, all threads.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedConfig

from tandem.model.attention import NAMES, register
from tandem.model.hf import DTYPES
from tandem.model.ranks import Ranks
from tandem.model.reshard import BUCKET_BYTES, Resharder
from tandem.model.skeleton import materialise, skeleton
from tandem.model.tensor_parallel import engine_skeleton, tensor_parallel_mesh
from tandem.observe.memory import PeakMemory, bytes_in_use
from tandem.trainer.fsdp import ShardedWeights, training_mesh
from tandem.trainer.policy import Policy

SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 16384}
MIB = 2**20


@dataclass
class Way:
    """To move weights, and what it took in each round."""

    work: Callable[[], object]
    bytes_moved: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    extra_bytes: list[float] = field(default_factory=list)

    def line(self, name: str, least: int) -> str:
        """A row of the table."""
        moved, extra = self.bytes_moved / MIB, max(self.extra_bytes, default=math.nan) / MIB
        seconds, cpu_seconds = statistics.median(self.seconds), statistics.median(self.cpu_seconds)
        return (
            f"{name:<16}{seconds:>9.3f}{cpu_seconds:>9.3f}{moved:>12.1f}{self.bytes_moved / least:>10.2f}{extra:>14.1f}"
        )


def trainer_weights(config: PreTrainedConfig, ranks: Ranks, device: torch.device) -> tuple[Policy, ShardedWeights]:
    """Random weights, spread as the trainer spreads them."""
    policy = Policy(skeleton(config), chunk_tokens=1024)
    mesh = training_mesh(ranks, replicas=1, device=device)
    weights = ShardedWeights(policy, mesh, head_dtype=torch.float32, device=device)
    for parameter in weights.parameters():
        parameter.data.normal_()
    return policy, weights


def engine_weights(
    config: PreTrainedConfig, mesh: DeviceMesh | None, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The weights of an engine's model."""
    model = engine_skeleton(config, attention=NAMES["sdpa"], tp_mesh=mesh, body_dtype=dtype, head_dtype=dtype)
    materialise(model, device)
    return dict(model.named_parameters())


def run_rank(rank: int, store: str, config: PreTrainedConfig, options: argparse.Namespace) -> None:
    """One process of the benchmark."""
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", ".*all_gather_into_tensor.* is deprecated", FutureWarning
    )  # its heir is newer than 2.11
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    ranks = Ranks(rank, options.ranks, options.ranks)
    size = options.tensor_parallel
    register()
    policy, weights = trainer_weights(config, ranks, device)
    source, whole = weights.shards(), list(policy.model.parameters())
    target = engine_weights(config, tensor_parallel_mesh(ranks, size, device), device, DTYPES[options.dtype])
    resharder = Resharder(ranks, source, target, bucket_bytes=options.bucket_mib * MIB)
    moved = resharder.run(source, target)  # also warms up

    peers = options.ranks - 1
    part = torch.ones(-(-moved.bytes_moved // (options.ranks * peers)), dtype=torch.uint8, device=device)
    parts = torch.ones(len(part) * options.ranks, dtype=torch.uint8, device=device)
    mine, theirs = part.repeat(options.ranks), torch.ones_like(parts)
    to_others = [0 if peer == rank else len(part) for peer in range(options.ranks)]
    others = slice(0, sum(to_others))
    whole_bytes = sum(weight.numel() * weight.dtype.itemsize for weight in whole)
    raw_bytes = len(part) * options.ranks * peers
    ways = {
        "reshard": Way(partial(resharder.run, source, target), moved.bytes_moved),
        "gather": Way(
            lambda: [weight.full_tensor() for weight in whole if isinstance(weight, DTensor)], whole_bytes * peers
        ),
        "raw all-gather": Way(partial(dist.all_gather_into_tensor, parts, part), raw_bytes),
        "raw all-to-all": Way(
            partial(dist.all_to_all_single, theirs[others], mine[others], to_others, to_others), raw_bytes
        ),
    }
    measure(list(ways.values()), options.rounds, device)
    if rank == 0:
        print(f"{whole_bytes / MIB:.0f} MiB of float32 weights on {options.ranks} ranks (one thread each)", end=" ")
        print(f"to {options.dtype}, tensor parallel {size}, bucket {options.bucket_mib} MiB; {options.rounds} rounds")
        print(f"{'':<16}{'seconds':>9}{'CPU s':>9}{'MiB moved':>12}{'of least':>10}{'extra MiB':>14}")
        for name, each in ways.items():
            print(each.line(name, moved.bytes_least), flush=True)
    dist.destroy_process_group()


def measure(ways: list[Way], rounds: int, device: torch.device) -> None:
    """Take turns."""
    memory = PeakMemory(device)
    for _ in range(rounds):
        for way in ways:
            dist.barrier()
            memory.start()
            before = bytes_in_use(device)
            begin, cpu_begin = time.perf_counter(), time.process_time()
            kept = way.work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            way.seconds.append(time.perf_counter() - begin)
            way.cpu_seconds.append(time.process_time() - cpu_begin)
            peak = memory.stop()
            if peak is not None and before is not None:
                way.extra_bytes.append(peak - before)
            del kept


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder with a config.json; a small Qwen3 without it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the engine")
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_BYTES // MIB)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.model is None:
        config = AutoConfig.for_model("qwen3", **SMALL)
    else:
        config = AutoConfig.from_pretrained(options.model)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (f"{folder}/store", config, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
