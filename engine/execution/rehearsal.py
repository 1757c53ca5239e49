"""Steps that run before a model serves: they measure peak memory and compile all kernels.

Their results are meaningless: all rows share one KV block. A device that compiles ahead of its first step and
uses host memory does not need them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from pagemill.engine.config import EngineConfig, SchedulerConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.execution.cuda_graphs import graph_bytes
from pagemill.engine.execution.model_runner import ModelRunner, captures_graphs
from pagemill.engine.execution.prepared_model import PreparedModel
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.plan import NewRow, RowWork, Sample, StepPlan
from pagemill.engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_DECODE = 1
"""Index of the plan in which every row has one token."""
_BLOCK = 1
"""The block of every row; block 0 is never written."""
_FEW = (16, 32, 64, 256)
"""Upper bounds of token counts with separate kernels for low-bit matmuls (`pagemill.kernels.gpu.tuning`)."""
_GREEDY = SamplingParams(temperature=0.0)
_FILTERED = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, logprobs=1)
_PLAIN = SamplingParams(temperature=0.9)


@contextmanager
def small_runner(
    model: PreparedModel,
    config: EngineConfig,
    limits: SchedulerConfig,
    shape: KVCacheShape,
    group: RankGroup | None,
    *,
    num_blocks: int,
) -> Iterator[ModelRunner]:
    """Yield a runner without graphs over a few KV blocks, for steps before a model serves; then free it.

    Slot 0 has a random adapter, if the model supports adapters.
    """
    small = replace(limits, num_kv_blocks=num_blocks, num_host_blocks=0)
    runner = ModelRunner(model, replace(config, enforce_eager=True), small, shape, group)
    adapter = nullcontext() if model.adapters is None else model.adapters.random_adapter()
    try:
        # The other ranks may still be loading.
        with adapter, nullcontext() if group is None else group.alone():
            yield runner
    finally:
        runner.close()


def step_bytes(
    model: PreparedModel,
    config: EngineConfig,
    limits: SchedulerConfig,
    shape: KVCacheShape,
    group: RankGroup | None = None,
) -> int:
    """Return a step's peak memory in addition to weights and caches; 0 on a device without rehearsal.

    The steps: as many prompt tokens as fit, every row drawing from a filtered distribution; one token for every row;
    one for a row with the longest context; both kinds together; few rows and tokens, which have separate kernels;
    and the first two with an adapter in every row.

    Raises:
        ConfigError: the largest step does not fit.
    """
    device = model.loaded.device
    if not device.rehearses:
        return 0
    started = time.perf_counter()
    try:
        with small_runner(model, config, limits, shape, group, num_blocks=_BLOCK + 1) as runner:
            plans = _plans(limits, shape, has_adapters=model.adapters is not None)
            num_bytes = device.peak_bytes(lambda: _run_all(runner, plans)) + runner.table_bytes
            if captures_graphs(model, config, shape, group):
                decode = device.peak_bytes(lambda: _run_all(runner, plans[_DECODE : _DECODE + 1]))
                row_bytes = model.loaded.vocab_size * model.loaded.dtype.itemsize
                num_bytes += graph_bytes(limits, row_bytes, decode)
    except torch.OutOfMemoryError as error:
        message = (
            f"a step of max_num_batched_tokens={limits.max_num_batched_tokens} tokens in "
            f"max_num_seqs={limits.max_num_seqs} rows of max_model_len={limits.max_model_len} does not fit next to "
            "the weights: lower one of them"
        )
        raise ConfigError(message, setting="max_num_batched_tokens") from error
    seconds = time.perf_counter() - started
    logger.info("a step takes up to %.2f GiB; kernels compiled in %.1f s", num_bytes / 2**30, seconds)
    return num_bytes


def _run_all(runner: ModelRunner, plans: Sequence[StepPlan]) -> None:
    for plan in plans:
        runner.launch(plan).wait()


def _plans(limits: SchedulerConfig, shape: KVCacheShape, *, has_adapters: bool) -> list[StepPlan]:
    count = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    length = max(1, min(limits.max_num_batched_tokens // count, limits.max_model_len - 1))
    blocks = [_BLOCK] * (-(-limits.max_model_len // shape.block_size) * len(shape.windows))
    new_rows = [
        NewRow(row, str(row), 0, [0] * length, length, list(blocks), params, seed=row)
        for row, params in enumerate(_kinds(count))
    ]
    plain = [
        NewRow(row, str(row), 0, [0] * length, length, list(blocks), _PLAIN, seed=row) for row in range(count)
    ]
    ends = [(row + 1) * length - 1 for row in range(count)]
    prompts = [RowWork(row, 0, length) for row in range(count)]
    each = [Sample(row, ends[row], length) for row in range(count)]
    decode = [RowWork(row, length, 1) for row in range(count)]
    last = limits.max_model_len - 1
    mixed = [RowWork(0, length, 1), *prompts[1:]] if length > 1 else decode
    following = [Sample(row, row, length + 1) for row in range(count)]
    adapted_rows = [replace(row, adapter_slot=0) for row in new_rows]
    adapted = [
        StepPlan(6, new_rows=adapted_rows, work=prompts, samples=each, has_adapters=True),
        StepPlan(7, work=decode, samples=following, has_adapters=True),
    ]
    return [
        StepPlan(0, new_rows=new_rows, work=prompts, samples=each, block_copies=[(_BLOCK, _BLOCK)]),
        StepPlan(1, work=decode, samples=following),
        StepPlan(2, work=[RowWork(0, last, 1)], samples=[Sample(0, 0, last + 1)]),
        StepPlan(3, new_rows=plain, work=mixed, samples=[Sample(0, 0, length + 1)]),
        *_small_steps(limits, count, length),
        *(adapted if has_adapters else ()),
    ]


def _small_steps(limits: SchedulerConfig, count: int, length: int) -> Iterator[StepPlan]:
    """Steps of few tokens and of few rows, of `count` rows with `length` prompt tokens each."""
    for few in _FEW:
        if few < count:
            decode = [RowWork(row, length, 1) for row in range(few)]
            yield StepPlan(4, work=decode, samples=[Sample(row, row, length + 1) for row in range(few)])
        if few < limits.max_num_batched_tokens:
            prompts = [RowWork(row, 0, min(few, length)) for row in range(min(count, max(1, few // length)))]
            yield StepPlan(5, work=prompts, samples=[Sample(0, 0, length + 1)])


def _kinds(count: int) -> list[SamplingParams]:
    """Return rows for every kind of sampling with separate kernels; most use the kind with the highest memory use."""
    return [_GREEDY if row % 8 == 7 else _FILTERED for row in range(count)]
