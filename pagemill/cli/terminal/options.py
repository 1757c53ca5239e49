"""Option types shared by several commands, and those of `pagemill run`, for use in signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagemill.cli.terminal.checked import (
    MAX_TEMPERATURE,
    Delimiter,
    Encoding,
    LogFormat,
    ModelOrPath,
    Text,
    between,
    checked,
    output_path,
)
from pagemill.common.sampling_fields import LabelProbs
from pagemill.producer.dataset.label_columns import LabelTemperature
from pagemill.producer.dataset.recipe import OnRow, OnTruncated
from pagemill.producer.dataset.tables.rows import Format, Quoting
from pagemill.producer.wire.schema.keys import AdapterName, ModelName
from pagemill.producer.wire.schema.text.chat import FunctionName

Texts = list[str] | None
MAX_ROWS = 10**12

ServedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        callback=checked(ModelOrPath),
        help=(
            "Served name; or a value of `pagemill worker --model`, which the run serves if no worker does."
        ),
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, max=2**31 - 1, help="Maximum number of output tokens per sample."),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, max=2**63 - 1, help="Random seed; equal seeds give equal samples."),
]
Stop = Annotated[Texts, typer.Option("--stop", help="Stop string; may be repeated.")]
Field = Annotated[
    Texts, typer.Option("--field", metavar="NAME=JSON", help="Other field of the job; may be repeated.")
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="NAME",
        callback=checked(AdapterName),
        help="Name of a LoRA adapter of the workers.",
    ),
]
After = Annotated[
    Texts,
    typer.Option(
        "--after",
        metavar="[NAME=]ID",
        help="Job to wait for; {NAME.text} in the prompt is its text; may be repeated.",
    ),
]
Tools = Annotated[
    Path | None,
    typer.Option(
        "--tools",
        exists=True,
        dir_okay=False,
        metavar="FILE",
        help="JSON list of functions; implies --chat.",
    ),
]
Images = Annotated[
    list[str] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="Image file or URL, placed before the prompt; implies --chat; may be repeated.",
    ),
]
ToolChoice = Annotated[
    str | None,
    typer.Option(
        "--tool-choice",
        metavar="CHOICE",
        callback=checked(FunctionName),
        help="none, auto, required, or the name of a function.",
    ),
]
NamedModels = Annotated[
    Texts,
    typer.Option(
        "--model",
        callback=checked(ModelName),
        help="Model to accept before a worker serves it; may be repeated.",
    ),
]
SeparateReasoning = Annotated[
    bool,
    typer.Option(
        "--separate-reasoning",
        help="Return the reasoning of every chat separately; all workers must support it.",
    ),
]
Continuation = Annotated[
    Texts,
    typer.Option(
        "--continuation",
        help="Text to score after the prompt, instead of generating; may be repeated.",
    ),
]
WorkerOption = Annotated[
    Texts,
    typer.Option(
        "--worker-option",
        metavar="NAME=VALUE",
        help="Setting of the worker that the run starts; may be repeated.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Do not print progress.")]
CancelRun = Annotated[
    bool, typer.Option("--cancel", help="Cancel the unfinished jobs of an earlier run of this command.")
]

# `pagemill run` alone
Rows = Annotated[
    list[Path],
    typer.Argument(
        metavar="[RECIPE.yaml] IN...",
        help="Optionally a recipe of several steps; then JSONL, CSV or TSV (also .gz, .zst), Parquet, "
        "a directory of such files, a pattern in quotes or several files; a folder of pictures, which has a column "
        "image; a Hugging Face dataset directory; "
        "or - for standard input.",
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "--out",
        callback=output_path,
        help="OUT.jsonl, .csv, .tsv (also .gz, .zst) or .parquet; written at the end. A folder, or "
        "DIR/part-{shard}.parquet: a file for each file of IN.",
    ),
]
Template = Annotated[
    str | None, typer.Option("--template", help="Template of the prompt, in Jinja2: 'Summarize: {{ text }}'.")
]
TemplateFile = Annotated[
    Path | None,
    typer.Option(
        "--template-file", exists=True, dir_okay=False, help="File with the template of the prompt."
    ),
]
System = Annotated[str | None, typer.Option("--system", help="Template of the system message.")]
NoChat = Annotated[bool, typer.Option("--no-chat", help="Send the text without the chat template.")]
Choices = Annotated[str | None, typer.Option("--choices", help="Allowed outputs, separated by commas.")]
LabelProbabilities = Annotated[
    str | None,
    typer.Option(
        "--label-probs",
        callback=checked(LabelProbs),
        help=(
            "Method for the probability of each label of --choices: product, mean (by length) or constrained."
        ),
    ),
]
LabelScale = Annotated[
    str,
    typer.Option(
        "--label-temperature",
        callback=checked(LabelTemperature),
        help=(
            "Temperature of these probabilities: a number, one for each stage (1.7,1.2), or fit (to --gold)."
        ),
    ),
]
EscalateBelow = Annotated[
    float | None,
    typer.Option(
        "--escalate-below",
        callback=between(0.0, 1.0),
        help="Probability of the label below which the model of --to labels the row.",
    ),
]
EscalateTo = Annotated[
    Texts,
    typer.Option(
        "--to",
        metavar="MODEL",
        callback=checked(ModelOrPath),
        help="Next model of a cascade, in the form of --model; may be repeated. The last one can "
        "be openai:https://HOST/v1/MODEL, a model of another API.",
    ),
]
ApiBudget = Annotated[
    int | None,
    typer.Option(
        "--api-budget",
        min=1,
        max=MAX_ROWS,
        metavar="TOKENS",
        help=(
            "Maximum number of tokens for --to openai:...; further rows keep the output of the "
            "previous model."
        ),
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        exists=True,
        dir_okay=False,
        metavar="FILE",
        help="File with the key for --to openai:...; default: the variable PAGEMILL_API_KEY.",
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option("--json-schema", help="JSON schema of the output: a file, or the text."),
]
Regex = Annotated[str | None, typer.Option("--regex", help="Regular expression that the output matches.")]
RunTemperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        callback=between(0.0, MAX_TEMPERATURE),
        help="Sampling temperature; 0: equal prompts run once and share the output.",
    ),
]
Gold = Annotated[
    str | None,
    typer.Option(
        "--gold",
        callback=checked(Text),
        help="Column with the correct labels, for accuracy and a confusion table.",
    ),
]
OutputColumn = Annotated[
    str | None,
    typer.Option(
        "--output-column",
        callback=checked(Text),
        help="Name of the new column. Default: output; label with --label-probs.",
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where", help="Condition for rows to process, in Jinja2: 'stars >= 3 and lang == \"de\"'."
    ),
]
ImageColumn = Annotated[
    str | None,
    typer.Option(
        "--image-column",
        callback=checked(Text),
        help="Column with images: paths, bytes, URLs or Hugging Face structs.",
    ),
]
OnNull = Annotated[
    str,
    typer.Option(
        "--on-null",
        callback=checked(OnRow),
        help="Action for a null in the prompt: fail, skip, or label (as an empty text).",
    ),
]
OnEmpty = Annotated[
    str,
    typer.Option(
        "--on-empty",
        callback=checked(OnRow),
        help="Action for a row with an empty prompt: fail, skip, or label.",
    ),
]
OnTruncatedOutput = Annotated[
    str | None,
    typer.Option(
        "--on-truncated",
        callback=checked(OnTruncated),
        help="Action for an output cut off at max_tokens: fail (default for constrained outputs) or label.",
    ),
]
SchemaColumns = Annotated[
    bool,
    typer.Option("--schema-columns", help="Add a column for each field of --json-schema: output.FIELD."),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, max=MAX_ROWS, help="Number of rows to run, from the first."),
]
RowsPerFile = Annotated[
    int | None,
    typer.Option(
        "--rows-per-file", min=1, max=MAX_ROWS, help="Number of rows per file, if --out is a folder."
    ),
]
MaxErrors = Annotated[
    int | None,
    typer.Option(
        "--max-errors", min=0, max=MAX_ROWS, help="Number of failed rows above which the run stops."
    ),
]
PricePerHour = Annotated[
    float | None,
    typer.Option(
        "--price-per-hour",
        callback=between(0.0, 1e9),
        help="Price of the machine per hour, for the cost in the report.",
    ),
]
Estimate = Annotated[
    bool,
    typer.Option(
        "--estimate",
        help="Run 100 rows, which are kept, and estimate the duration of all. OUT is not written.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print prompts and token counts, without submitting.")
]
Detach = Annotated[
    bool,
    typer.Option("--detach", help="Submit the rows and exit; run the command again to collect the outputs."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an OUT of other settings, and do not resume from it.")
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        callback=output_path,
        help="File for the HTML report. Default: OUT.report.html.",
    ),
]
LogFormatName = Annotated[
    str,
    typer.Option(
        "--log-format",
        envvar="PAGEMILL_LOG_FORMAT",
        callback=checked(LogFormat),
        help="Log format: console or json.",
    ),
]
FormatName = Annotated[
    str | None, typer.Option("--format", callback=checked(Format), help="jsonl, csv, tsv, parquet or arrow.")
]
EncodingName = Annotated[
    str, typer.Option("--encoding", callback=checked(Encoding), help="Encoding of text files.")
]
DelimiterName = Annotated[
    str | None,
    typer.Option(
        "--delimiter", callback=checked(Delimiter), help=r"Character between CSV fields, such as ';' or '\t'."
    ),
]
QuotingName = Annotated[
    str | None,
    typer.Option(
        "--quoting",
        callback=checked(Quoting),
        help="none: quotes in CSV and TSV files are text. Default: standard.",
    ),
]
Window = Annotated[int, typer.Option("--window", min=1, max=10**6, help="Maximum number of jobs in flight.")]
