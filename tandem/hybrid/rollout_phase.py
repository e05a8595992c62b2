"""What can be done while the engine has the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.batch import Prompt, Response, Rollouts
from tandem.config.rollout import RolloutConfig
from tandem.hybrid.phases import PhaseHandle, Watch
from tandem.hybrid.worker import Worker
from tandem.rollout.options import SamplingOptions
from tandem.runtime.worker_group import WorkerGroup


class RolloutPhase(PhaseHandle):
    """Samples responses from the policy as it is. Works inside of its `with` block only."""

    def __init__(
        self,
        group: WorkerGroup[Worker],
        defaults: RolloutConfig,
        *,
        seed: int,
        policy_version: int,
        watch: Watch,
        timed_as: str,
    ) -> None:
        super().__init__("rollout")
        self.timing = watch.timing
        self._timed_as = timed_as
        self._group = group
        self._defaults = defaults
        self._seed = seed
        self.policy_version = policy_version

    def options(
        self,
        *,
        step: int,
        n: int | None = None,
        max_response_length: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> SamplingOptions:
        """Sampling options: what is not given is taken from the config's `rollout` section."""
        defaults = self._defaults
        return SamplingOptions(
            n=defaults.n if n is None else n,
            max_response_length=defaults.max_response_length if max_response_length is None else max_response_length,
            temperature=defaults.temperature if temperature is None else temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            stop=defaults.stop,
            seed=self._seed if seed is None else seed,
            step=step,
        )

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        """Yield each response as soon as it ends, so that scoring can begin.

        Raises:
            PhaseError: The phase has ended.
        """
        self.check_open()
        responses = self._group.stream(Worker.stream, prompts, options)
        while True:
            with self.timing(self._timed_as):
                response = next(responses, None)
            if response is None:
                return
            yield response
            self.check_open()

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        n: int | None = None,
        max_response_length: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> Rollouts:
        """Answer each prompt with a group of responses.

        Args:
            prompts: What to answer.
            step: Of the loop; the noise is a function of seed, step, prompt, response and position.
            n: Responses to each prompt.
            max_response_length: In tokens.
            temperature: Of the sampling; 0 = the likeliest token always.
            seed: Of the noise.

        Raises:
            PhaseError: The phase has ended.
        """
        options = self.options(
            step=step, n=n, max_response_length=max_response_length, temperature=temperature, seed=seed
        )
        return self.as_rollouts(prompts, list(self.stream(prompts, options)), options)

    def as_rollouts(
        self, prompts: Sequence[Prompt], responses: Sequence[Response], options: SamplingOptions
    ) -> Rollouts:
        """Streamed responses as rollouts of this policy."""
        return Rollouts.from_responses(
            prompts,
            responses,
            temperature=options.temperature or 1.0,
            policy_version=self.policy_version,
            cut_logprobs=self._defaults.engine == "vllm" and options.is_cut,
        )
