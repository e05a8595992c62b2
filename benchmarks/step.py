"""Cost of one whole step, rollout and update, on a real model: seconds, CPU seconds, peak memory.

    python -m benchmarks.step work/smollm2/model

The work: 4 prompts x 8 responses x 64 tokens, the length forced, so that each run does the same. With TRL installed
(`pip install trl`), `--trl` measures its GRPOTrainer on the same work in the same run.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

QUESTION = "What is {} + {}? Think about it first, then answer with the number only."


def prompts_of(tokenizer, count: int, length: int | None) -> list[list[int]]:
    """Chat prompts of about 45 tokens; with `length`, of that many, by repeating the question."""
    prompts = []
    for number in range(count):
        text = QUESTION.format(number, number + 3)
        tokens: list[int] = []
        while not tokens or (length is not None and len(tokens) < length):
            messages = [{"role": "user", "content": text}]
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            tokens = tokenizer(rendered, add_special_tokens=False)["input_ids"]
            text = f"{text} {QUESTION.format(number, number + 3)}"
        prompts.append(tokens)
    return prompts


def tandem_step(args: argparse.Namespace) -> dict[str, float]:
    """Two steps of Tandem; the second one counts."""
    import torch

    import tandem as td
    from tandem.batch import Prompt
    from tandem.hybrid.worker import Worker

    def write_on(worker: Worker) -> None:
        worker.sampling.engine.eos_ids = ()  # nothing ends a response early

    model = {"dtype": args.dtype, "lora_rank": args.lora_rank}
    workers = td.start(args.model, lr=1e-6, config={"model": model, "cluster": {"threads": args.threads}})
    workers._group.call(write_on)
    prompts = [
        Prompt(tokens=tuple(tokens), text="", prompt_id=number)
        for number, tokens in enumerate(prompts_of(workers.tokenizer, args.prompts, args.prompt_length))
    ]
    times: dict[str, float] = {}
    for step in range(2):
        begin, cpu = time.perf_counter(), time.process_time()
        with workers.rollout_phase() as engine:
            rollouts = engine.generate(prompts, n=args.n, max_response_length=args.length, step=step)
        times |= {"rollout_s": time.perf_counter() - begin, "rollout_cpu_s": time.process_time() - cpu}
        begin, cpu = time.perf_counter(), time.process_time()
        advantages = torch.linspace(-1, 1, len(rollouts))
        with workers.train_phase() as trainer:
            trainer.update(rollouts, advantages, trainer.old_logprobs(rollouts))
        times |= {"update_s": time.perf_counter() - begin, "update_cpu_s": time.process_time() - cpu}
    assert int(rollouts.response_lengths.sum()) == args.prompts * args.n * args.length
    return times


def trl_step(args: argparse.Namespace) -> dict[str, float]:
    """Three steps of TRL's GRPOTrainer; the mean of the last two counts."""
    import tempfile

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [{"prompt": tokenizer.decode(tokens)} for tokens in prompts_of(tokenizer, args.prompts, args.prompt_length)]
    marks: list[tuple[float, float]] = []

    class Marks(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            marks.append((time.perf_counter(), time.process_time()))

        def on_train_end(self, *_: object, **__: object) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=args.n,
        gradient_accumulation_steps=args.prompts, steps_per_generation=args.prompts, num_generations=args.n,
        max_completion_length=args.length, generation_kwargs={"min_new_tokens": args.length}, beta=0.0,
        num_iterations=1, loss_type="dapo", gradient_checkpointing=False, max_steps=3, report_to=[],
        bf16=args.dtype == "bfloat16", save_strategy="no", logging_steps=100, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=args.model, args=config, train_dataset=Dataset.from_list(rows * 8), callbacks=[Marks()],
        reward_funcs=lambda completions, **_: [float(len(set(text)) % 7) for text in completions],
    )  # fmt: skip
    trainer.train()
    (first, first_cpu), (last, last_cpu) = marks[1], marks[-1]
    steps = len(marks) - 2
    return {"step_s": (last - first) / steps, "step_cpu_s": (last_cpu - first_cpu) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder, such as work/smollm2/model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of each response")
    parser.add_argument("--prompt-length", type=int, default=None, help="tokens of each prompt at least")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank; 0 = all weights")
    parser.add_argument("--trl", action="store_true", help="alternate with TRL's GRPOTrainer")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", choices=("tandem", "trl"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        result = tandem_step(args) if args.one == "tandem" else trl_step(args)
        result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"who": args.one, **{name: round(value, 2) for name, value in result.items()}}))
        return
    for _ in range(args.rounds):
        for who in ("tandem", "trl") if args.trl else ("tandem",):
            command = [sys.executable, "-m", "benchmarks.step", *sys.argv[1:], "--one", who]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
            print(done.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
