"""The stream of prompt batches that a run draws from, and held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.batch import Prompt
from tandem.config.data import DataConfig, DataSource
from tandem.data.columns import DEFAULT_SOURCE_KEY, data_source_of, ground_truth_of, prompt_of
from tandem.data.files import GivenRows, Source, read_rows
from tandem.data.length import OverLength
from tandem.data.order import DrawOrder
from tandem.data.table import PromptTable, load_each, load_table
from tandem.errors import DataError

Sources = str | Path | GivenRows | Sequence[DataSource]


class Prompts:
    """An endless stream of prompt batches, each of exactly `per_step` prompts.

        prompts = Prompts("train.parquet", tokenizer, per_step=16, seed=0)
        for batch in prompts.take(100): ...

    Every row comes once per epoch, in an order of the epoch's own; a batch at the end of an epoch is filled up from
    the next. With several sources, draws are shared out by their weights, each source starts over when it is used up,
    and an epoch is as many draws as there are rows in all.

    Each prompt drawn has a `prompt_id` of its own, its number in the whole stream. The order is a function of the
    seed alone; `state_dict` and `load_state_dict` go on in it exactly.

    Args:
        source: File, folder, hub dataset or generator (see `read_rows`); or the rows themselves, as a list of
            mappings or a function that yields them; or several `DataSource`s with weights.
        tokenizer: The policy's.
        per_step: Prompts in a batch, at most as many as there are rows.
        seed: At least 0. Order of the rows; also handed to generators.
        prompt_key: Column of the prompt: a text, or a list of messages.
        truth_key: Column of the ground truth; `auto` looks for the usual names, `none` says that there is none.
        source_key: Column that names the source of a row.
        chat_template: auto, always, never, or the path of a template (see `ChatTemplate`).
        chat_template_options: Variables for the template, such as {"enable_thinking": False}.
        system_prompt: Put before messages that have none.
        max_prompt_length: In tokens, template included.
        over_length: What happens above that: filter, error, or cut at the left, right or middle.
        shuffle: False keeps the order of the files.
        max_rows: Use the first so many rows of each source.
    """

    def __init__(
        self,
        source: Sources,
        tokenizer: PreTrainedTokenizerBase,
        *,
        per_step: int = 64,
        seed: int = 0,
        prompt_key: str = "prompt",
        truth_key: str = "auto",
        source_key: str = DEFAULT_SOURCE_KEY,
        chat_template: str = "auto",
        chat_template_options: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        max_prompt_length: int = 1024,
        over_length: OverLength = "filter",
        shuffle: bool = True,
        max_rows: int | None = None,
    ) -> None:
        """
        Raises:
            DataError: Sources, rows or template cannot be used; as many problems at once as possible.
            ValueError: An option is out of its range.
        """
        config = DataConfig(
            prompts_per_step=per_step,
            prompt_key=prompt_key,
            truth_key=truth_key,
            source_key=source_key,
            chat_template=chat_template,
            chat_template_options=dict(chat_template_options or {}),
            system_prompt=system_prompt,
            max_prompt_length=max_prompt_length,
            over_length=over_length,
            shuffle=shuffle,
            max_rows=max_rows,
        )
        sources = _weighted(source)
        load = partial(load_table, tokenizer=tokenizer, config=config, seed=seed, max_rows=max_rows)
        self._tables: list[PromptTable] = load_each([part for part, _ in sources], load)
        weights = [weight for _, weight in sources]
        self._per_step = per_step
        self._num_drawn = 0
        if per_step > len(self):
            raise self._too_few()
        num_rows = [len(table) for table in self._tables]
        self._order = DrawOrder(num_rows, weights, seed=seed, shuffle=shuffle)
        self._data = {  # what a position in the stream depends on
            "seed": seed,
            "shuffle": shuffle,
            "rows": num_rows,
            "weights": weights,
            "tokens": [table.digest for table in self._tables],
            "ground truths": [table.truth_digest for table in self._tables],
        }

    @classmethod
    def from_config(cls, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> Prompts:
        """The stream that section `data` describes. Errors as above."""
        return cls(
            [*sources_of(config)],
            tokenizer,
            per_step=config.prompts_per_step,
            seed=seed,
            prompt_key=config.prompt_key,
            truth_key=config.truth_key,
            source_key=config.source_key,
            chat_template=config.chat_template,
            chat_template_options=config.chat_template_options,
            system_prompt=config.system_prompt,
            max_prompt_length=config.max_prompt_length,
            over_length=config.over_length,
            shuffle=config.shuffle,
            max_rows=config.max_rows,
        )

    def __len__(self) -> int:
        """Rows in use, of all sources."""
        return sum(len(table) for table in self._tables)

    @property
    def num_dropped(self) -> int:
        """Rows left out by `over_length=filter`."""
        return sum(table.num_dropped for table in self._tables)

    @property
    def has_raw_despite_template(self) -> bool:
        """Some prompts are texts as they stand, although the tokenizer has a chat template."""
        return any(table.has_raw_despite_template for table in self._tables)

    @property
    def data_sources(self) -> set[str]:
        """Names that the rows in use give as their source."""
        return {name for table in self._tables for name in table.data_sources}

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return sum(self._order.counts) / len(self)

    def steps_for(self, epochs: int) -> int:
        """Batches until every row has been drawn `epochs` times. Batches flow across epochs: rounded up only once.

        As steps of a run: where groups are drawn anew (`algorithm.idle_groups=resample`) a step takes several
        batches, so that the run goes through the data more often. Its length is known beforehand all the same, and
        with it the learning rates.
        """
        return -(-epochs * len(self) // self._per_step)

    def next_batch(self) -> tuple[Prompt, ...]:
        """Draw `per_step` prompts."""
        batch = []
        for _ in range(self._per_step):
            source, row = self._order.draw()
            batch.append(self._tables[source].prompt(row, prompt_id=self._num_drawn))
            self._num_drawn += 1
        return tuple(batch)

    def take(self, num_batches: int) -> Iterator[tuple[Prompt, ...]]:
        """Draw `num_batches` batches, one after the other."""
        for _ in range(num_batches):
            yield self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, and what it is a position in. JSON can hold it."""
        return {"num_drawn": self._num_drawn, "counts": list(self._order.counts), "data": self._data}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_changes: bool = False) -> None:
        """Go on from where `state` was saved: the next batches are those that would have come then.

        Args:
            state: What `state_dict` returned.
            allow_changes: Other data, or another seed, than then is no error: its first epoch starts here. The
                `prompt_id`s go on, so that no draw repeats the sampling noise of an earlier one.

        Raises:
            DataError: The data or their order are not those of then.
        """
        if state["data"] == self._data:
            self._order.move_to(state["counts"])
        elif allow_changes:
            self._order.move_to([0] * len(self._tables))
        else:
            changed = [name for name, value in self._data.items() if state["data"].get(name) != value]
            raise DataError(
                f"the data are not those that this run was started with: {', '.join(changed)} changed",
                remedy="restore them, or set run.allow_changes=true to go on with the new data from their beginning",
            )
        self._num_drawn = state["num_drawn"]

    def _too_few(self) -> DataError:
        dropped = f" ({self.num_dropped} more are over the length limit)" if self.num_dropped else ""
        return DataError(
            f"data.prompts_per_step={self._per_step}, but there are only {len(self)} prompts{dropped}",
            remedy=f"set data.prompts_per_step to at most {len(self)}, or add data",
        )


def load_prompts(
    source: str | Path | GivenRows,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig | None = None,
    *,
    seed: int = 0,
) -> tuple[Prompt, ...]:
    """All prompts of one held-out set, in their own order, `prompt_id` counted from 0.

    Columns, template and length limit are those of `config` (default: `DataConfig()`); its `max_rows` is for training
    data. To know how many were left out as too long, see `load_table`.

    Raises:
        DataError: The source or some of its rows cannot be used.
    """
    rows = str(source) if isinstance(source, Path) else source
    table = load_table(rows, tokenizer, config or DataConfig(), seed=seed)
    return tuple(table.prompt(row, prompt_id=row) for row in range(len(table)))


def check_data(config: DataConfig, held_out: Sequence[str] = (), *, seed: int = 0) -> None:
    """Look at the first row of each source, before any model is loaded.

    Raises:
        DataError: A source is missing, unreadable, empty or of another format, or lacks a column; all at once.
    """

    def check(path: str) -> None:
        row = next(read_rows(path, seed=seed))
        prompt_of(row, config.prompt_key)
        ground_truth_of(row, config.truth_key)
        data_source_of(row, config.source_key)

    load_each([*(source.path for source in sources_of(config)), *held_out], check)


def sources_of(config: DataConfig) -> tuple[DataSource, ...]:
    """`data.train` as a list of sources.

    Raises:
        DataError: It is not set.
    """
    if config.train is None:
        raise DataError("data.train is not set", remedy="give the file of the prompts, data.train=train.parquet")
    if isinstance(config.train, str):
        return (DataSource(path=config.train),)
    return config.train


def _weighted(source: Sources) -> list[tuple[Source, float]]:
    """Each source with its weight."""
    if isinstance(source, str | Path):
        return [(str(source), 1.0)]
    if callable(source):
        return [(source, 1.0)]
    parts = list(source)
    described = [(part.path, part.weight) for part in parts if isinstance(part, DataSource)]
    rows = [part for part in parts if not isinstance(part, DataSource)]
    return [*described, *([(rows, 1.0)] if rows or not described else [])]
