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
from pagemill.producer.dataset.frames import FrameSource, labeled, source_of
from pagemill.producer.dataset.label_columns import LabelTemperature
from pagemill.producer.dataset.recipe import NO_MODEL, OnRow, OnTruncated, Recipe
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
    api_budget: int | None
    api_key_file: str | Path | None
    where: str | None
    image_column: str | None
    on_null: OnRow
    on_empty: OnRow
    on_truncated: OnTruncated | None
    rows_per_file: int | None


class Pipeline:
    """Sends every row of a dataset through a model: a prompt template, a model, the shape of the output.

        pipeline = Pipeline("Is this review good or bad? {{ text }}", model="smollm2", choices=["good", "bad"])
        summary = pipeline.run("reviews.jsonl", out="labeled.jsonl")

    Args:
        template: Jinja2 template of the prompt; None: the column `messages` or `prompt` is the prompt.
        model: the model's served name. Default: the producer's, or that of the live workers.
        system: template of a system message.
        choices: labels of which the output is one.
        json_schema: schema of the output, as text, object or pydantic class.
        regex: regular expression that the output matches.
        chat: use the model's chat template; False sends the prompt unchanged.
        temperature: 0 always selects the most probable token.
        **fields: further fields of `Job`, for instance `max_tokens=64`.

    Raises:
        DatasetError: an option is invalid.
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
        recipe = Recipe(model or NO_MODEL, template, system, chat, {"temperature": temperature, **fields})
        recipe.check(None)
        self.recipe: Recipe | Chain = recipe

    def run(
        self,
        rows: str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]] | Any,
        *,
        out: str | Path | None = None,
        producer: Producer | None = None,
        on_progress: Callable[[Tally], None] | None = None,
        on_row: Callable[[Mapping[str, Any]], None] | None = None,
        **options: Unpack[RunFields],
    ) -> Summary:
        """Process rows and write `out`. Call it again after any interruption.

        Args:
            rows: a file, a URI that fsspec opens, a list of files, a directory, a glob pattern, a data frame
                (pandas, polars, Arrow), or an iterable of mappings.
            out: output file, or a folder for several files. It can be omitted for a data frame; such a run cannot
                resume.
            producer: the producer to submit with; None: a new one.
            on_progress: called a few times per second.
            on_row: called with every output line, in the order of the input, while `out` is written.
            **options: options of the run, as those of `pagemill run`: `limit`, `gold`, `where`, `rows_per_file`
                and others.

        Returns:
            Counts of the run. For a data frame, `frame` is a new frame of the same kind with the output as a column,
            null for failed rows. Failed rows are in `out`.errors.jsonl.

        Raises:
            DatasetError: an option or the input is invalid, or no row makes a job.
            TooManyErrors: more rows failed than `max_errors`.
            RedisUnavailable: the server does not respond.
            QueueFull: the queue accepts no more jobs.
        """
        with contextlib.ExitStack() as stack:
            if isinstance(rows, str | Path) and (uri := uri_of(rows)) is not None:
                source: Source = open_source(stack.enter_context(open_stream(uri)))
            else:
                source = source_of(rows)
            if out is None:
                if not isinstance(source, FrameSource):
                    raise DatasetError("the output needs a file: out='labeled.jsonl'")
                out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "out.jsonl"
            producer = producer or stack.enter_context(Producer())
            dataset = DatasetRun(source, out, self.recipe, **options)
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
                summary.frame = labeled(source, dataset, outputs)
            return summary


class RecipePipeline(Pipeline):
    """Sends every row of a dataset through several steps; `run` is that of `Pipeline`.

        pipeline = RecipePipeline("recipe.yaml")
        df = pipeline.run(df, out="out.parquet").frame

    Args:
        recipe: a YAML file, or a mapping with its content (docs/recipes.md).
        model: model of the steps that name none.

    Raises:
        DatasetError: the recipe is invalid.
    """

    def __init__(self, recipe: str | Path | Mapping[str, Any], *, model: str | None = None) -> None:
        chain = Chain.from_steps(recipe) if isinstance(recipe, Mapping) else read_recipe(Path(recipe))
        self.recipe = chain.with_model(model or NO_MODEL)
