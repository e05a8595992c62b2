"""vLLM as rollout engine: in this process, fed with the trainer's weights, asked token by token.

It starts with weights of no meaning: `load_weights` sends it those of the policy, in place. Nothing is read from disk
but the model's config, which is written for it.

A response's noise is that of a generator seeded with (seed, step, prompt, response), so it does not depend on the
other responses as long as vLLM's products give a row the same bits whatever the batch is; the schedule is a function
of the inputs, and so the same inputs give the same responses on CPUs.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import tempfile
import uuid
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from tandem.batch import Prompt, Response
from tandem.errors import ModelError, PhaseError
from tandem.model.ranks import ALONE, Ranks
from tandem.rollout.engine import checked_length
from tandem.rollout.noise import uniform_noise
from tandem.rollout.options import SamplingOptions
from tandem.rollout.stop import StopStrings, split_stop
from tandem.rollout.vllm_answer import Answer
from tandem.rollout.vllm_process import starting_vllm

_PREFILL_TOKENS = 4096  # of a step on CPUs, prompts and new tokens together
_LEAST_TEMPERATURE = 0.01  # vLLM raises lower ones but 0 to this


@dataclass(frozen=True)
class VllmSettings:
    """How an engine is made."""

    dtype: torch.dtype  # of the weights, the head's included
    head_dtype: torch.dtype  # in which the head's product is taken
    device: torch.device
    max_length: int  # of prompt and response together, in tokens
    max_concurrent: int  # responses decoded at once
    kv_cache_bytes: int
    tensor_parallel: int
    seeded: bool  # each response has noise of its own
    options: Mapping[str, Any] = field(default_factory=dict)  # of vLLM's EngineArgs, checked


class VllmEngine:
    """An `Engine`. It has weights of its own, which sleep and wake with it on GPUs; on CPUs they stay."""

    def __init__(
        self,
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        settings: VllmSettings,
        *,
        eos_ids: Sequence[int],
        ranks: Ranks = ALONE,
    ) -> None:
        """Start vLLM; the engine is asleep, and has no weights yet.

        Args:
            config: Of the model, with its architecture.
            tokenizer: Decodes responses; vLLM has none.
            settings: Sizes, precision, vLLM's own options.
            eos_ids: Every token that ends a response.
            ranks: All of them make their engines at once. `settings.tensor_parallel` neighbours have one together, and
                must make the same calls, and read every response.

        Raises:
            ModelError: vLLM refuses the model or an option, or has too little memory.
        """
        self.policy_version = 0
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self._config = deepcopy(config)
        self._config.dtype = settings.dtype
        self._settings = settings
        self._ranks = ranks
        self._numbers = itertools.count()
        self._open: dict[str, Answer] = {}
        self._awake = False
        self.is_broken = False  # a call of vLLM's came to no end, so that nothing is known of its state: `restart`
        self.sleep_level = 2  # on GPUs: weights are not kept, they will be sent; 1 = they are, in the host's memory
        self._llm = self._start()

    def _start(self) -> Any:
        """An LLMEngine, asleep."""
        gc.collect()  # an engine that nobody has any more: vLLM puts a single one to sleep in a process
        meeting = self._ranks.gather(uuid.uuid4().hex)[0]
        with starting_vllm(), tempfile.TemporaryDirectory() as folder:
            from vllm.distributed.parallel_state import destroy_model_parallel
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            self._config.save_pretrained(folder)
            try:
                config = EngineArgs(**self._arguments(folder)).create_engine_config()
                if config.model_config.is_moe:  # experts need a group that a dense model before it has not made
                    destroy_model_parallel()
                llm = LLMEngine(config, _executor(self._ranks, meeting), log_stats=False)
            except (ValueError, RuntimeError, AssertionError) as error:
                raise ModelError(
                    f"vLLM cannot be started with this model: {error}",
                    remedy="set rollout.engine=embedded, or change rollout.vllm_options, rollout.kv_cache_gib or the "
                    "lengths (data.max_prompt_length, rollout.max_response_length)",
                ) from error
        for file in Path("/dev/shm").glob(f"{meeting}-*"):
            file.unlink(missing_ok=True)  # all ranks have mapped it, and a killed process would leave it there
        # Its end would take the process group along, which is the trainer's, too, and that of the next engine here.
        llm.engine_core._finalizer.detach()
        self._end = weakref.finalize(self, llm.model_executor.shutdown)
        self._end.atexit = False
        gc.unfreeze()
        if self._sleeps:
            llm.sleep(self.sleep_level)
        return llm

    def _arguments(self, folder: str) -> dict[str, Any]:
        """Of EngineArgs."""
        settings = self._settings
        arguments: dict[str, Any] = {
            "model": folder,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # the model's own would bend the distribution
            "load_format": "dummy",
            "model_impl": "vllm",
            "dtype": str(settings.dtype).removeprefix("torch."),
            "max_model_len": settings.max_length,
            "max_num_seqs": settings.max_concurrent,
            "kv_cache_memory_bytes": settings.kv_cache_bytes,
            "logprobs_mode": "processed_logprobs",  # of the distribution that is drawn from
            "tensor_parallel_size": settings.tensor_parallel,
            "enable_sleep_mode": self._sleeps,
            "seed": 0,
            "enforce_eager": not self._sleeps,  # compiling takes longer than it saves on a CPU
        }
        if settings.head_dtype != settings.dtype:
            arguments["hf_overrides"] = {"head_dtype": str(settings.head_dtype).removeprefix("torch.")}
        if settings.device.type == "cpu":  # a prompt in pieces draws tokens too many, which no seed there can take back
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(_PREFILL_TOKENS, settings.max_length, settings.max_concurrent)
        if self._sleeps:  # the trainer has the rest; the KV cache has a size of its own
            arguments["gpu_memory_utilization"] = 0.01
        if not self._ranks.alone:
            arguments["distributed_executor_backend"] = "external_launcher"
        return arguments | dict(settings.options)

    @property
    def _sleeps(self) -> bool:
        """Whether vLLM can take memory back on this device: it has no such thing on CPUs."""
        return self._settings.device.type == "cuda"

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights outlive a sleep."""
        return not self._sleeps or self.sleep_level == 1

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the policy's weights, in place. All names of a tied tensor are given.

        Args:
            weights: Names as in the model's files, whole tensors; kept by vLLM until their layer is complete.
        """
        if self._sleeps and not self._awake:
            self._llm.wake_up(["weights"])
        if not self._llm.apply_model(_has_head)[0]:  # it takes the embedding
            weights = ((name, tensor) for name, tensor in weights if not name.startswith("lm_head."))
        if self._settings.device.type == "cpu":
            self._llm.apply_model(_forget_packed_experts)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def wake(self, policy_version: int) -> None:
        """See `Engine`. What was computed with other weights is forgotten."""
        self.policy_version = policy_version
        if self._sleeps and not self._awake:
            self._llm.wake_up()  # what still sleeps: the KV cache, and the weights where they were kept
        self._awake = True
        self._forget_prefixes()

    def sleep(self) -> None:
        """See `Engine`: on GPUs weights and KV cache go, on CPUs vLLM lets go of nothing. Open streams end."""
        self._drop([*self._open])
        if self._sleeps and self._awake:
            self._llm.sleep(self.sleep_level)
        self._awake = False

    @contextmanager
    def _unbroken(self) -> Generator[None]:
        """A call that changes what vLLM knows of its requests. Ctrl-C, or an error, may end it halfway."""
        if self.is_broken:
            raise PhaseError(
                "vLLM was interrupted in its work", remedy="begin another rollout phase: it starts anew then"
            )
        self.is_broken = True
        yield
        self.is_broken = False

    def restart(self, sleep_level: int) -> None:
        """Make the engine anew, without weights, asleep."""
        self._end()
        del self._llm
        self._open.clear()
        self.sleep_level = sleep_level
        self._awake = False
        self._llm = self._start()
        self.is_broken = False

    def _forget_prefixes(self) -> None:
        done = self._llm.reset_prefix_cache()
        assert done, "vLLM kept keys and values of old weights: some request is still open"

    def check(self, prompts: Sequence[Prompt], options: SamplingOptions) -> None:
        """See `Engine`.

        Raises:
            ValueError: The temperature is one that vLLM would raise.
        """
        if 0 < options.temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature is {options.temperature}, but vLLM samples at {_LEAST_TEMPERATURE} or above: take more, "
                "or 0 for the likeliest token, or rollout.engine=embedded"
            )
        longest = checked_length(prompts, options, awake=self._awake)
        most = self._settings.max_length
        if longest > most:
            raise ModelError(
                f"a prompt and its response may take {longest} tokens, but vLLM was started for {most}",
                remedy="raise data.max_prompt_length or rollout.max_response_length, as far as the model has positions",
            )

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        """See `Engine`.

        Where `options` cut the distribution (top_p, top_k), the log-probs are those of what is left.
        """
        self.check(prompts, options)
        return self._stream(prompts, options)

    def _stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        stop_ids, stop_texts = split_stop(options.stop, self.tokenizer)
        eos_ids = frozenset((*self.eos_ids, *stop_ids))
        stop = StopStrings(stop_texts, self._decode)
        seeds = self._seeds(prompts, options)
        places: dict[str, tuple[int, int]] = {}  # of our requests: group and index
        for group, prompt in enumerate(prompts):
            for index in range(options.n):
                params = _sampling_params(options, eos_ids, seeds[group][index], by_token=bool(stop))
                places[self._add(prompt.tokens, params)] = (group, index)
        try:
            while places:
                for number in list(places):
                    if number not in self._open:
                        raise PhaseError(
                            "the engine has slept since", remedy="read responses in the phase they began in"
                        )
                    answer = self._open[number]
                    if answer.finished or (stop and answer.is_stopped(stop)):
                        group, index = places.pop(number)
                        self._drop([number])
                        yield answer.as_response(group, index, prompts[group].prompt_id, self._decode, stop, eos_ids)
                if places:
                    self._advance()
        finally:
            self._drop(list(places))

    def score(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Log-probs of all tokens but the first, at temperature 1."""
        number = self._add(tuple(tokens), _scoring_params())
        answer = self._open[number]
        while not answer.finished:
            self._advance()
        self._drop([number])
        return answer.prompt_logprobs

    def _add(self, tokens: tuple[int, ...], params: Any) -> str:
        from vllm.inputs import tokens_input

        number = str(next(self._numbers))
        with self._unbroken():
            self._llm.add_request(number, tokens_input(list(tokens)), params)
            self._open[number] = Answer(tokens)
        return number

    def _advance(self) -> None:
        """One step of all requests, those of other streams included."""
        with self._unbroken():
            for output in self._llm.step():
                self._open[output.request_id].take(output)

    def _drop(self, numbers: Sequence[str]) -> None:
        if self.is_broken:  # all of them end with it
            return
        there = [number for number in numbers if number in self._open]  # else given up by a sleep
        with self._unbroken():
            self._llm.abort_request([number for number in there if not self._open[number].finished])
            for number in there:
                del self._open[number]

    def _seeds(self, prompts: Sequence[Prompt], options: SamplingOptions) -> list[list[int | None]]:
        """Of each response."""
        if not self._settings.seeded or options.temperature == 0:
            return [[None] * options.n for _ in prompts]
        prompt_ids = torch.tensor([prompt.prompt_id for prompt in prompts], dtype=torch.int64).view(-1, 1)
        noise = uniform_noise(options.seed, options.step, prompt_ids, torch.arange(options.n), torch.tensor(0))
        return (noise * 2**53).to(torch.int64).tolist()

    def _decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        token_lists = [list(tokens) for tokens in sequences]
        return self.tokenizer.batch_decode(token_lists, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _has_head(model: torch.nn.Module) -> bool:
    return hasattr(model, "lm_head")


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Have vLLM pack the experts' next weights, too: on CPUs it packs those that a layer's kernel is made for, only."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _executor(ranks: Ranks, meeting: str) -> type[Any]:
    """The class of vLLM's that runs the model in this process; on several ranks in their process group.

    Of "external_launcher", vLLM's own for that, the ranks' shared memory has the same name in every run on a machine,
    and that of a run that was killed stays there: the next one would not start. So here it is named after `meeting`.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    class InProcess(UniProcExecutor):
        def _distributed_args(self) -> tuple[str, int, int]:
            address, rank, device = super()._distributed_args()
            if address.startswith("file://"):  # its group of one, which outlives the engine, meets in this file
                atexit.register(Path(address.removeprefix("file://")).unlink, missing_ok=True)
            return address, rank, device

    class InProcessGroup(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"tandem:{meeting}", ranks.rank, 0  # of the devices, the only one that this process sees

    return InProcess if ranks.alone else InProcessGroup


def _sampling_params(options: SamplingOptions, eos_ids: Set[int], seed: int | None, *, by_token: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k or 0,
        seed=seed,
        max_tokens=options.max_response_length,
        stop_token_ids=sorted(eos_ids),
        ignore_eos=True,  # all of them are among those
        logprobs=0,  # of the token that is drawn, and no other
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if by_token else RequestOutputKind.FINAL_ONLY,
    )


def _scoring_params() -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
