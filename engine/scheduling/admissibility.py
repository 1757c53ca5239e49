"""Checks whether a request can run alone."""

from __future__ import annotations

from pagemill.engine.config import SchedulerConfig
from pagemill.engine.errors import NeverFits, PromptTooLong
from pagemill.engine.scheduling.kv.block_groups import BlockGroups
from pagemill.engine.scheduling.request import Request
from pagemill.engine.tasks import Score


def check_fits(request: Request, config: SchedulerConfig) -> None:
    """Raise NeverFits if the rows, the budget or the pool can't hold a request even alone."""
    # Scored continuations and labels can run sequentially.
    runs_apart = isinstance(request.task, Score) or request.labels is not None
    num_sequences = 1 if runs_apart else len(request.live_sequences)
    if num_sequences > config.max_num_seqs:
        raise NeverFits(f"{num_sequences} sequences need as many rows, there are {config.max_num_seqs}")
    # The last token is never written; full prompt blocks are shared, all others are separate per sequence.
    groups = BlockGroups.from_config(config)
    num_columns = groups.columns(request.max_num_tokens - 1)
    num_shared = len(request.prompt_token_ids) // config.block_size if num_sequences > 1 else 0
    together = num_shared + num_sequences * (num_columns - num_shared)
    needed = sum(
        min(together, num_sequences * groups.most_held(window, num_columns)) for window in groups.windows
    )
    usable = config.num_kv_blocks - 1
    if needed > usable:
        raise NeverFits(
            f"{num_sequences} x {request.max_num_tokens} tokens need {needed} KV blocks of "
            f"{config.block_size}, the pool has {usable}"
        )


def check_labels_fit(request: Request, config: SchedulerConfig) -> None:
    """Raise PromptTooLong if the model can't read the prompt and the longest label."""
    needed = len(request.prompt_token_ids) + request.max_tokens
    if needed > config.max_model_len:
        raise PromptTooLong(
            f"the prompt and the longest label have {needed} tokens, the model takes {config.max_model_len} "
            "(max_model_len)"
        )
