"""`pagemill run --dry-run`: the first prompts as they would be sent, and the length of every one."""

from __future__ import annotations

import contextlib
import json
import unicodedata
from pathlib import Path
from typing import Any

import typer

from pagemill.cli.app import print_stderr
from pagemill.cli.local_worker import has_server, live_workers
from pagemill.cli.terminal.checked import served_name
from pagemill.common.plain_text import escaped
from pagemill.engine.errors import InvalidRequest
from pagemill.producer.dataset.run import DatasetRun
from pagemill.producer.dataset.tables.rows import RowError
from pagemill.producer.dataset.tokens import TokenCount, TokenCounter
from pagemill.producer.wire.schema.errors import PagemillError
from pagemill.producer.wire.schema.images import hide_images
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.server.discovery import find_redis

PREVIEW_ROWS = 3
SHOWN_HEAD, SHOWN_TAIL = 1_200, 600
"""Characters that are shown of a prompt, at its beginning and at its end, if it is longer."""
KNOWN_LIMITS = {"smollm2": 8_192, "echo": 4_096}
"""Of the models that need no directory."""


def prompt_limit(model: str | None, url: str | None, queue: str, worker_options: list[str]) -> int | None:
    """Return the most tokens of prompt and output that one job may have; None if unknown.

    From live workers of the model, or from the model's own configuration. A dry run needs no server.
    """
    with contextlib.suppress(PagemillError):
        alive = live_workers(find_redis(url), queue) if has_server(url) else []
        serving = [info for info in alive if model is None or served_name(model) in info.models]
        if len({name for info in serving for name in info.models}) == 1 or model is not None:
            announced = [info.max_model_len for info in serving if info.max_model_len is not None]
            if announced:
                return min(announced)
    for option in worker_options:
        name, _, value = option.partition("=")
        if name == "max_model_len" and value.isdecimal():
            return int(value)
    return None if model is None else KNOWN_LIMITS.get(model, _configured(Path(model) / "config.json"))


def preview(dataset: DatasetRun, counter: TokenCounter, limit: int | None, *, as_json: bool) -> bool:
    """Print the first prompts, and all errors; return whether all rows can be submitted."""
    tokens = rows = jobs = bad = skipped = last = last_bad = last_skipped = 0
    longest, long_rows, first_long, are_exact = 0, 0, 0, True
    unfilled = {step.name for step in dataset.chain.at_once if step.recipe.places}
    for row, step, made in dataset.previews():
        rows, last = rows + (row.number != last), row.number
        job, size = _counted(made, counter, is_complete=step not in unfilled)
        if isinstance(job, Job):
            jobs, are_exact = jobs + 1, are_exact and size.is_exact
            if limit is not None and size.size + 1 > limit:  # at least one token of output
                long_rows, first_long = long_rows + 1, first_long or row.number
        elif job.is_skipped:
            skipped, last_skipped = skipped + (row.number != last_skipped), row.number
        else:  # several steps of one row can fail
            bad, last_bad = bad + (row.number != last_bad), row.number
        tokens, longest = tokens + size.size, max(longest, size.size)
        if rows <= PREVIEW_ROWS:
            _print(row.number, step, job, size, as_json=as_json)
    total = dataset.count()
    mean = TokenCount(round(tokens / jobs) if jobs else 0, are_exact)
    parts = [
        f"{rows:,}{f' of {total:,} rows' if total is not None else ' rows'} looked at: {bad:,} bad",
        *([f"{skipped:,} skipped"] if skipped else []),
        f"{mean.about}{mean.size:,} prompt tokens each, {longest:,} at most",
    ]
    if limit is None:
        parts.append("whether that fits is not known: no live worker serves the model (--model)")
    elif long_rows:
        parts.append(f"{long_rows:,} too long for the model's {limit:,} (the first: row {first_long:,})")
    else:
        parts.append(f"the model takes {limit:,}")
    print_stderr(", ".join(parts) + "; nothing submitted")
    return not (bad or long_rows)


def _counted(
    job: Job | RowError, counter: TokenCounter, *, is_complete: bool
) -> tuple[Job | RowError, TokenCount]:
    """Return a job with its tokens, or as a bad row if a worker would reject it."""
    if isinstance(job, RowError):
        return job, TokenCount(0, is_exact=True)
    try:
        return job, counter.count(job, is_complete=is_complete)
    except InvalidRequest as error:
        return RowError(error.code, str(error)), TokenCount(0, is_exact=True)


def prompt_text(job: Job) -> str:
    """Return a job's prompt in readable form, without the middle of a long one."""
    if job.messages is not None:
        return "\n".join(
            f"[{message.role}] {_visible(message.description() + message.more())}" for message in job.messages
        )
    return _visible(job.prompt) if job.prompt is not None else f"{len(job.prompt_token_ids or ())} token ids"


def _print(number: int, step: str, job: Job | RowError, size: TokenCount, *, as_json: bool) -> None:
    if as_json:
        shown: dict[str, Any] = {"row": number, "prompt_tokens": size.size, "exact": size.is_exact}
        if step:
            shown["step"] = step
        shown["error" if isinstance(job, RowError) else "job"] = (
            job.message if isinstance(job, RowError) else json.loads(job.to_payload())
        )
        typer.echo(hide_images(json.dumps(shown, ensure_ascii=False)))
        return
    typer.echo(f"--- row {number}, {f'step {step}, ' if step else ''}{size.about}{size.size:,} prompt tokens")
    if isinstance(job, Job):
        typer.echo(prompt_text(job))
    else:
        typer.echo(f"{'skipped' if job.is_skipped else 'bad row'}: {escaped(job.message)}")


def _configured(path: Path) -> int | None:
    """Return the context length that a checkpoint's configuration gives."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        length = {**config, **(config.get("text_config") or {})}["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return length if isinstance(length, int) else None


def _visible(text: str) -> str:
    """Shorten a text, and escape control characters: data must not move the cursor or set the terminal's title."""
    left_out = len(text) - SHOWN_HEAD - SHOWN_TAIL
    if left_out > 0:
        text = f"{text[:SHOWN_HEAD]}\n... {left_out:,} characters ...\n{text[-SHOWN_TAIL:]}"
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) != "Cc" else f"\\x{ord(char):02x}"
        for char in text
    )
