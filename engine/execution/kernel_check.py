"""Compares a model's kernels with plain torch at startup: a wrong kernel must never serve."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from pagemill.engine.config import EngineConfig, SchedulerConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.execution.prepared_model import PreparedModel
from pagemill.engine.execution.rehearsal import small_runner
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.plan import NewRow, RowWork, Sample, StepPlan
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels import dispatch
from pagemill.kernels.self_check import KernelCheck
from pagemill.kernels.types.low_rank import NO_ADAPTER

logger = logging.getLogger(__name__)

_ROWS = 8
_LONG_ROW_BLOCKS = 3
_LONG_ROW = 270
"""Minimum numbers of blocks and of prompt tokens of the first row: more than 256 tokens have separate kernels."""
_SHORT = 2
"""Number of prompt tokens of the other rows."""
_FILTERED = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, logprobs=1)


def check_kernels(
    model: PreparedModel,
    config: EngineConfig,
    limits: SchedulerConfig,
    shape: KVCacheShape,
    group: RankGroup | None = None,
) -> int:
    """Run a few small steps, compare every kernel in them, and replace wrong kernels by plain torch.

    Does nothing on a device without rehearsal.

    Returns:
        The number of operators that plain torch computes in this process in place of kernels.

    Raises:
        ConfigError: a kernel is wrong, and `config.strict_kernels` is set.
    """
    device = model.loaded.device
    if not device.rehearses:
        return 0
    started = time.perf_counter()
    check, num_blocks = KernelCheck(), 1 + _long_row_blocks(shape) + _ROWS
    with (
        small_runner(model, config, limits, shape, group, num_blocks=num_blocks) as runner,
        dispatch.observed(check),
    ):
        has_adapters = model.adapters is not None
        for plan in _plans(limits, shape, model.loaded.vocab_size, has_adapters=has_adapters):
            runner.launch(plan).wait()
    seconds = time.perf_counter() - started
    logger.info("%d calls of kernels compared with plain torch in %.1f s", check.num_compared, seconds)
    for name, reason in check.uncompared.items():
        logger.warning("the kernel %s was not compared with plain torch: %s", name, reason)
    for name, reason in check.wrong.items():
        if config.strict_kernels:
            message = f"the kernel {name} differs from plain torch ({reason}) on {device.device}"
            raise ConfigError(message, setting="strict_kernels")
        logger.error(
            "the kernel %s differs from plain torch (%s): plain torch replaces it, slowly; run "
            "`python -m benchmarks.gpu` and report its output",
            name,
            reason,
        )
        dispatch.replace_by_reference(name)
    return len(dispatch.replaced())


def _long_row_blocks(shape: KVCacheShape) -> int:
    return max(_LONG_ROW_BLOCKS, -(-_LONG_ROW // shape.block_size))


def _plans(
    limits: SchedulerConfig, shape: KVCacheShape, vocab_size: int, *, has_adapters: bool
) -> list[StepPlan]:
    """Return steps: prompts of several rows, one over several blocks; one token per row; and both combined.

    With adapters, the first step again; every other row uses the one in slot 0.
    """
    budget = limits.max_num_batched_tokens
    count = max(1, min(_ROWS, limits.max_num_seqs, budget // _SHORT))
    room = min(budget - _SHORT * (count - 1), limits.max_model_len - 3)
    long = max(1, min(_long_row_blocks(shape) * shape.block_size - 2, room))
    lengths = [long, *([_SHORT] * (count - 1))]
    rows = [_new_row(row, length, limits, shape, vocab_size) for row, length in enumerate(lengths)]
    ends = [sum(lengths[: row + 1]) - 1 for row in range(count)]
    prompts = [RowWork(row, 0, length) for row, length in enumerate(lengths)]
    decode = [RowWork(row, length, 1) for row, length in enumerate(lengths)]
    decode_again = [RowWork(row, _SHORT + 1, 1) for row in range(1, count)]
    firsts = [Sample(row, ends[row], length) for row, length in enumerate(lengths)]
    seconds = [Sample(row, row, length + 1) for row, length in enumerate(lengths)]
    last = [Sample(0, count - 2 + long, long)]
    copied = [(1, _long_row_blocks(shape) + _ROWS)]
    adapted_rows = [replace(row, adapter_slot=NO_ADAPTER if row.row % 2 else 0) for row in rows]
    adapted = StepPlan(3, new_rows=adapted_rows, work=prompts, samples=firsts, has_adapters=True)
    return [
        StepPlan(0, new_rows=rows, work=prompts, samples=firsts),
        StepPlan(1, work=decode, samples=seconds, block_copies=copied),
        StepPlan(2, new_rows=rows[:1], work=[*decode_again, RowWork(0, 0, long)], samples=last),
        *([adapted] if has_adapters else []),
    ]


def _new_row(row: int, length: int, limits: SchedulerConfig, shape: KVCacheShape, vocab_size: int) -> NewRow:
    """Return a row whose keys are in separate blocks: the first blocks for the first row, one for each other row."""
    num_long = _long_row_blocks(shape)
    own = [1 + block for block in range(num_long)] if row == 0 else [num_long + row]
    columns = -(-limits.max_model_len // shape.block_size)
    table = (own + [own[-1]] * columns)[:columns]
    token_ids = [(7 * row + place) % vocab_size for place in range(length)]
    return NewRow(row, str(row), 0, token_ids, length, table * len(shape.windows), _FILTERED, seed=row)
