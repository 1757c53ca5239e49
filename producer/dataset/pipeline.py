"""`Pipeline` and `RecipePipeline`: dataset runs from Python, with callbacks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from pagemill.producer.client import flows
from pagemill.producer.client.job_fields import RowFields
from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.frames import FrameSource, labelled, source_of
from pagemill.producer.dataset.labels.columns import LabelTemperature
from pagemill.producer.dataset.recipe import NO_MODEL, OnCut, OnRow, Recipe
from pagemill.producer.dataset.recipe_run import RecipeRun
from pagemill.producer.dataset.run import DatasetRun
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.recipe_file import read_recipe
from pagemill.producer.dataset.summary import Summary
from pagemill.producer.dataset.tables.places import open_stream, uri_of
from pagemill.producer.dataset.tables.rows import Source, open_source
from pagemill.producer.dataset.work import Tally


class RunFields(TypedDict, total=False):
    """The options of one run; `DatasetRun` describes each."""

    limit: int | None
    gold: str | None
    max_errors: int | None
    window: int
    overwrite: bool
    price_per_hour: float | None
    output_column: str
    schema_columns: bool
    label_temperature: LabelTemperature
    escalate_below: float | None
    to: Sequence[str] | str
    where: str | None
    on_null: OnRow
    on_empty: OnRow
    on_cut: OnCut | None


class Pipeline:
    """The processing of every row: a prompt template, a model, the shape of the output.

        pipeline = Pipeline("Is this review good or bad? {{ text }}", model="smollm2", choices=["good", "bad"])
        summary = pipeline.run("reviews.jsonl", out="labelled.jsonl")

    `fields` are further fields of a Job, for instance max_tokens=64. Without a template the column `messages`
    or `prompt` is the prompt. `json_schema` is text, an object or a pydantic class. Without a model it is the
    producer's, or what the live workers serve. Raises DatasetError for invalid options.
    """

    def __init__(
        self,
        template: str | None = None,
        *,
        model: str | None = None,
        system: str | None = None,
        choices: Sequence[str] | None = None,
        json_schema: str | Mapping[str, Any] | type[Any] | None = None,
        regex: str | None = None,
        chat: bool = True,
        temperature: float = 0.0,
        **fields: Unpack[RowFields],
    ) -> None:
        shape = {"choice": choices and list(choices), "json": json_schema, "regex": regex}
        given = {name: value for name, value in shape.items() if value is not None}
        if given:
            fields["structured_outputs"] = given
        self.recipe = Recipe(
            model or NO_MODEL, template, system, chat, {"temperature": temperature, **fields}
        )
        self.recipe.check(None)

    def run(
        self,
        rows: str | Path | Iterable[Mapping[str, Any]] | Any,
        *,
        out: str | Path | None = None,
        producer: Producer | None = None,
        on_progress: Callable[[Tally], None] | None = None,
        on_row: Callable[[Mapping[str, Any]], None] | None = None,
        **options: Unpack[RunFields],
    ) -> Summary:
        """Run over a file, a data frame (pandas, polars, Arrow) or any iterable of mappings, and write `out`.

        Files may be URIs that fsspec knows, such as s3://bucket/rows.jsonl.
        Call it again after any interruption. Of a data frame `summary.frame` is a new frame of the same kind, with
        the output as a column: null for a row that failed. `out` may then be left out, and nothing is kept to
        resume from. `on_progress` is called a few times a second, `on_row` with every output line in the input's
        order as `out` is written. Bad rows are in `out`.errors.jsonl. Raises DatasetError, also if no row makes a
        job; TooManyErrors, RedisUnavailable, QueueFull.
        """
        with contextlib.ExitStack() as stack:
            if isinstance(rows, str | Path) and (uri := uri_of(rows)) is not None:
                source: Source = open_source(stack.enter_context(open_stream(uri)))
            else:
                source = source_of(rows)
            if out is None:
                if not isinstance(source, FrameSource):
                    raise DatasetError("say where the output goes: out='labelled.jsonl'")
                out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "out.jsonl"
            producer = producer or stack.enter_context(Producer())
            dataset = self._dataset(source, out, options)
            if NO_MODEL in dataset.models:
                dataset.use_model(producer.model or producer.run_flow(flows.served_model(producer.queue)))
            outputs: dict[int, Mapping[str, Any]] = {}
            if on_progress is not None:
                dataset.on_news = on_progress
            if on_row is not None:
                dataset.on_row = on_row
            if isinstance(source, FrameSource):
                dataset.on_end = outputs.__setitem__
            summary = dataset.execute(producer)
            if isinstance(source, FrameSource):
                summary.frame = labelled(source, dataset, outputs)
            return summary

    def _dataset(self, source: Source, out: str | Path, options: RunFields) -> DatasetRun:
        return DatasetRun(source, out, self.recipe, **options)


class RecipePipeline(Pipeline):
    """The processing of every row in several steps; `run` is that of a `Pipeline`.

        pipeline = RecipePipeline("recipe.yaml")
        df = pipeline.run(df, out="out.parquet").frame

    A recipe is a YAML file, or a mapping of what such a file holds (docs/recipes.md). `model` is that of steps that
    name none. Raises DatasetError for an invalid recipe.
    """

    def __init__(self, recipe: str | Path | Mapping[str, Any], *, model: str | None = None) -> None:
        chain = Chain.of(recipe) if isinstance(recipe, Mapping) else read_recipe(Path(recipe))
        self.chain = chain.with_model(model or NO_MODEL)
        self.recipe = self.chain.first.recipe

    def _dataset(self, source: Source, out: str | Path, options: RunFields) -> DatasetRun:
        return RecipeRun(source, out, chain=self.chain, **options)
