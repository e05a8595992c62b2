"""Which rank answers which prompts, where several hold a copy of the weights.

4 ranks, tensor_parallel=2:   ranks 0, 1 = replica 0   prompts 0, 2, 4, ...
                              ranks 2, 3 = replica 1   prompts 1, 3, 5, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tandem.batch import Prompt, Response
from tandem.model.ranks import Ranks
from tandem.rollout.engine import Engine
from tandem.rollout.options import SamplingOptions


class ReplicatedEngine:
    """Answers this rank's share of the prompts. A whole group goes to one replica.

    A response is the same whichever replica writes it, as far as the engine's responses do not depend on the other
    prompts: its noise is that of its prompt.
    """

    def __init__(self, engine: Engine, ranks: Ranks, tensor_parallel: int = 1) -> None:
        """`tensor_parallel` consecutive ranks are a replica; they generate in lockstep and the first one yields."""
        self._engine = engine
        self._replica = ranks.rank // tensor_parallel
        self._replicas = ranks.size // tensor_parallel
        self._is_first = ranks.rank % tensor_parallel == 0

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        """Like the engine's. Call it on every rank with the whole batch, and read it to its end.

        Raises:
            PhaseError, DataError, ModelError: As the engine does. What can be seen in the batch is raised on every
                rank alike, what only the answering shows on those of one replica.
        """
        self._engine.check(prompts, options)
        return self._stream(prompts[self._replica :: self._replicas], options)

    def _stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Response]:
        for response in self._engine.stream(prompts, options):
            if self._is_first:
                yield replace(response, group=self._replica + response.group * self._replicas)
