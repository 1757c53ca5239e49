"""`Pipeline`: a dataset run from Python, with callbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from pagemill.producer.client.job_fields import RowFields
from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset.recipe import Recipe
from pagemill.producer.dataset.rows import MemorySource, Source, open_source
from pagemill.producer.dataset.run import DatasetRun
from pagemill.producer.dataset.summary import Summary
from pagemill.producer.dataset.work import WINDOW, Tally


class Pipeline:
    """The processing of every row: a prompt template, a model, the shape of the output.

        pipeline = Pipeline("Is this review good or bad? {{ text }}", model="smollm2", choices=["good", "bad"])
        summary = pipeline.run("reviews.jsonl", out="labelled.jsonl")

    `fields` are further fields of a Job, for instance max_tokens=64. Without a template the column `messages`
    or `prompt` is the prompt. Raises DatasetError for invalid options.
    """

    def __init__(
        self,
        template: str | None = None,
        *,
        model: str,
        system: str | None = None,
        choices: Sequence[str] | None = None,
        json_schema: str | None = None,
        regex: str | None = None,
        chat: bool = True,
        temperature: float = 0.0,
        **fields: Unpack[RowFields],
    ) -> None:
        shape = {"choice": choices and list(choices), "json": json_schema, "regex": regex}
        given = {name: value for name, value in shape.items() if value is not None}
        if given:
            fields["structured_outputs"] = given
        self.recipe = Recipe(model, template, system, chat, {"temperature": temperature, **fields})
        self.recipe.check(None)

    def run(
        self,
        rows: str | Path | Iterable[Mapping[str, Any]],
        *,
        out: str | Path,
        producer: Producer | None = None,
        limit: int | None = None,
        gold: str | None = None,
        max_errors: int | None = None,
        window: int = WINDOW,
        overwrite: bool = False,
        on_progress: Callable[[Tally], None] | None = None,
        on_row: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Summary:
        """Run over a file or any iterable of rows, and write `out`; call again after any interruption.

        `on_progress` is called a few times a second, `on_row` with every output line in the input's order as
        `out` is written. Bad rows are in `out`.errors.jsonl. Raises DatasetError, TooManyErrors,
        RedisUnavailable, QueueFull.
        """
        source: Source = open_source(Path(rows)) if isinstance(rows, str | Path) else MemorySource(rows)
        dataset = DatasetRun(
            source, Path(out), self.recipe, limit, gold, max_errors, window=window, overwrite=overwrite
        )
        if on_progress is not None:
            dataset.on_news = on_progress
        if on_row is not None:
            dataset.on_row = on_row
        with contextlib.ExitStack() as stack:
            return dataset.execute(producer or stack.enter_context(Producer()))
