"""Counts prompts' tokens like a worker, for `pagemill run --dry-run`, with the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pagemill.cli.app import print_stderr
from pagemill.cli.terminal.checked import served_name
from pagemill.engine.errors import EngineError
from pagemill.producer.dataset.tokens import TokenCounter
from pagemill.producer.wire.schema.job import Job

if TYPE_CHECKING:
    from pagemill.engine.text.input_processor import InputProcessor

_UNLIMITED = 2**30
"""The caller compares lengths with the model's limit."""


def token_counter(models: Sequence[str | None], worker_options: Sequence[str]) -> TokenCounter:
    """Return a counter that is exact for those models whose files and libraries are on this machine.

    Args:
        models: as `--model` names them.
        worker_options: `NAME=VALUE`; a worker's chat template and parsers change its prompts.
    """
    options = dict(option.partition("=")[::2] for option in worker_options)
    exact = {}
    for model in models:
        if model is None:
            continue
        try:
            processor = _processor(model, options)
        except ModuleNotFoundError:  # without the extra `worker`
            continue
        except EngineError as error:
            print_stderr(f"estimating the tokens of prompts: {error}")
            continue
        if processor is not None:
            exact[served_name(model)] = _counting(processor)
    return TokenCounter(exact)


def _processor(model: str, options: dict[str, str]) -> InputProcessor | None:
    """Return the part of an engine that tokenizes; None without a tokenizer. Does not download."""
    from pagemill.engine.models.directory import find_model
    from pagemill.engine.models.echo import is_echo
    from pagemill.engine.text.input_processor import InputLimits, InputProcessor
    from pagemill.engine.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

    tokenizer: Tokenizer | None
    if is_echo(model):
        tokenizer = ByteTokenizer()
    else:
        found = find_model(model)
        tokenizer = None if found is None else load_tokenizer(found.directory, options.get("chat_template"))
    if tokenizer is None:
        return None
    limits = InputLimits(_UNLIMITED, _UNLIMITED, _UNLIMITED, max_num_seqs=_UNLIMITED)
    return InputProcessor(
        tokenizer,
        limits,
        tool_call_parser=options.get("tool_call_parser"),
        reasoning_parser=options.get("reasoning_parser"),
    )


def _counting(processor: InputProcessor) -> Callable[[Job], int]:
    from pagemill.worker.jobs.intake import processed

    def count(job: Job) -> int:
        token_ids, _, task, *_ = processed(job, "", processor)
        return len(token_ids) + task.num_tokens

    return count
