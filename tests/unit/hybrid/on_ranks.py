"""Workers whose ranks are processes of the `ranks` fixture: each of them makes every call, as its own controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import tandem as td
from tandem.hybrid.start import _start, resolve_here
from tandem.hybrid.worker import Worker
from tandem.model.ranks import Ranks


class OneOfMany:
    """A `WorkerGroup` as one rank sees it."""

    def __init__(self, ranks: Ranks, make_worker: Callable[[Ranks], Worker]) -> None:
        self.num_workers = ranks.size
        self.ranks = ranks
        self.worker = make_worker(ranks)

    def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return method(self.worker, *args, **kwargs)

    def call_each(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        return self.ranks.gather(self.call(method, *args, **kwargs))

    def stream(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for items in self.ranks.gather(list(method(self.worker, *args, **kwargs))):
            yield from items

    def start(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.call(method, *args, **kwargs))
        self.ranks.gather(0)  # done on all
        return future

    def close(self) -> None:
        """Nothing to end."""


def start_on_ranks(ranks: Ranks, model: Path, config: Mapping[str, Mapping[str, Any]], **settings: Any) -> td.Workers:
    """Like `td.start`, on the ranks of this process group."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "cluster": {"num_workers": ranks.size, "threads": 1},
        "rollout": {"max_concurrent": 8},
        "trainer": {"lr": 1e-2, "warmup_steps": 0},
    }
    if ranks.alone:
        config = {
            name: {k: v for k, v in section.items() if k != "tensor_parallel"} for name, section in config.items()
        }
    for name, section in config.items():
        sections[name] = {**sections.get(name, {}), **section}
    loaded = resolve_here(td.config_from_dict(sections, need_data=False, need_reward=False))
    return _start(
        loaded,
        run_folder=None,
        total_steps=None,
        make_group=lambda _, make_worker: OneOfMany(ranks, make_worker),
        **settings,
    )
