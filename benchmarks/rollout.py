"""Tokens per second of transformers' generate, of the embedded engine and of vLLM, by turns in one process.

    python benchmarks/rollout.py MODEL_FOLDER [--batch 1 8 32 64] [--dtype float32] [--tokens 64] [--repeats 3]

vLLM takes part where it is installed. All write the same number of tokens (EOS ends nothing), draw at temperature 1,
and hand back what a training step needs: tokens, and the log-prob of each under the policy. By turns, so that what
else the machine does falls on all; CPU seconds are those of all threads of the process, and of this process only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tandem.batch import Prompt
from tandem.model.attention import NAMES, register
from tandem.model.ranks import ALONE
from tandem.model.whole_tensors import WholeTensors
from tandem.rollout.embedded import EmbeddedEngine
from tandem.rollout.engine import Engine
from tandem.rollout.options import SamplingOptions
from tandem.rollout.vllm import VllmEngine, VllmSettings
from tandem.rollout.vllm_checks import cache_bytes_needed, is_installed

PROMPT_LENGTH = 45
GROUP = 8


def prompts_for(batch: int, vocabulary: int) -> list[Prompt]:
    """Prompts of random tokens, for groups of 8 responses; for one alone where `batch` is 1."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (max(1, batch // GROUP), PROMPT_LENGTH), generator=generator)
    return [Prompt(tuple(row), "", prompt_id=number) for number, row in enumerate(ids.tolist())]


@torch.inference_mode()
def generate(model: PreTrainedModel, prompts: list[Prompt], n: int, tokens: int) -> int:
    """transformers' generate on the same work; returns the number of tokens written."""
    ids = torch.tensor([prompt.tokens for prompt in prompts]).repeat_interleave(n, dim=0)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    written = output.sequences[:, ids.shape[1] :]
    for position, logits in enumerate(output.logits):
        logits.float().log_softmax(-1).gather(1, written[:, position : position + 1])
    return written.numel()


def rollout(engine: Engine, prompts: list[Prompt], sampling: SamplingOptions) -> int:
    """An engine on the same work; returns the number of tokens written."""
    engine.wake(engine.policy_version + 1)  # as in a run: what is derived from the weights is made anew in each step
    return sum(len(response.tokens) for response in engine.stream(prompts, sampling))


def start_vllm(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: int, tokens: int) -> VllmEngine:
    """vLLM with the model's weights, for `batch` responses at once."""
    config = model.config
    config.architectures = [type(model).__name__]
    length = PROMPT_LENGTH + tokens
    settings = VllmSettings(
        dtype=model.dtype,
        head_dtype=model.dtype,
        device=torch.device("cpu"),
        max_length=length,
        max_concurrent=batch,
        kv_cache_bytes=batch * cache_bytes_needed(config, length, model.dtype),
        tensor_parallel=1,
        seeded=True,
    )
    engine = VllmEngine(config, tokenizer, settings, eos_ids=[])
    whole = WholeTensors(ALONE, model, {}, names=None, dtype=model.dtype, device=torch.device("cpu"))
    engine.load_weights(whole.read({}))
    return engine


@dataclass
class Rates:
    """Tokens per second of each turn of one side."""

    cpu: list[float] = field(default_factory=list)  # per CPU second of all threads
    wall: list[float] = field(default_factory=list)  # per second of the clock

    def measure(self, work: Callable[[], int]) -> None:
        """Take one turn."""
        cpu, wall = time.process_time(), time.perf_counter()
        tokens = work()
        self.cpu.append(tokens / (time.process_time() - cpu))
        self.wall.append(tokens / (time.perf_counter() - wall))

    def ratio(self, other: Rates) -> float:
        """Median of turn by turn, in CPU seconds."""
        return median(own / others for own, others in zip(self.cpu, other.cpu, strict=True))


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a Hugging Face causal language model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64], help="responses: 1, or multiples of 8")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Print one line for each batch size."""
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    register()
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    plain = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="sdpa").eval()
    shared = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation=NAMES["sdpa"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    vllm = start_vllm(plain, tokenizer, max(options.batch), options.tokens) if is_installed() else None

    print(
        f"{options.dtype}, {options.threads} thread(s), responses of {options.tokens} tokens to prompts of "
        f"{PROMPT_LENGTH}; tokens per CPU second / per second, median of {options.repeats} turns"
    )
    names = ["generate", "embedded", *(["vllm"] if vllm else [])]
    others = [name for name in names if name != "embedded"]
    print(f"{'batch':>6}" + "".join(f"{name:>16}" for name in names) + "  embedded / " + ", / ".join(others))
    for batch in options.batch:
        prompts = prompts_for(batch, plain.config.vocab_size)
        engine = EmbeddedEngine(shared, tokenizer, eos_ids=[], max_concurrent=batch)
        sampling = SamplingOptions(n=min(GROUP, batch), max_response_length=options.tokens)
        sides: dict[str, Callable[[], int]] = {
            "generate": partial(generate, plain, prompts, sampling.n, options.tokens),
            "embedded": partial(rollout, engine, prompts, sampling),
        }
        if vllm is not None:
            sides["vllm"] = partial(rollout, vllm, prompts, sampling)
        rates = {name: Rates() for name in names}
        for _ in range(options.repeats):
            for name, work in sides.items():
                rates[name].measure(work)
        figures = "".join(f"{median(rate.cpu):>9.1f} /{median(rate.wall):>5.0f}" for rate in rates.values())
        ratios = "".join(f"{rates['embedded'].ratio(rates[name]):>11.2f}" for name in others)
        print(f"{batch:>6}{figures}{ratios}", flush=True)


if __name__ == "__main__":
    main()
