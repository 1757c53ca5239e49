"""Decode steps as CUDA graphs: one launch instead of the hundreds of a model's forward pass.

A graph replays the recorded kernels with the recorded addresses. There is therefore one graph per bucket of
rows, all with the same static inputs. A step's inputs, padded to the bucket, are copied there before its
graph is replayed. The kernels read all values that vary between steps (lengths, block tables, slots) on the
device.

Steps with adapters have separate graphs, with two more kernels per linear layer. Their grids fit any tiles of the
bucket's rows; programs without a tile exit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pagemill.engine.config import SchedulerConfig
from pagemill.engine.execution.forward_pass import Forwarded, are_first_tokens
from pagemill.engine.execution.input_batch import NULL_BLOCK, StepInputs, bucket_size
from pagemill.engine.execution.sampling.processors import SampleWork
from pagemill.engine.plan import StepPlan
from pagemill.kernels.types.low_rank import NO_ADAPTER, AdapterRows, most_tiles
from pagemill.kernels.types.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

Forward = Callable[[StepInputs], torch.Tensor]
"""Inputs to logits [num_tokens, vocab_size]."""
Replay = Callable[[], object]

NO_GRAPHS = "no CUDA graphs"
_MAX_ROWS = 512
_WARM_UPS = 2
_WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS' workspace for the capturing stream, on Hopper."""
_TABLE_ITEM_BYTES = 4


def buckets_up_to(max_num_seqs: int) -> list[int]:
    """Return the row counts to capture, largest first: graphs share memory, and the largest needs the most."""
    most = bucket_size(min(max_num_seqs, _MAX_ROWS))
    return sorted({bucket_size(count) for count in range(1, most + 1)}, reverse=True)


def graph_bytes(limits: SchedulerConfig, logits_row_bytes: int, step_bytes: int) -> int:
    """Return the memory of all graphs, in addition to that of eager steps.

    Args:
        logits_row_bytes: bytes of one row of logits.
        step_bytes: peak memory of a decode step with as many rows as possible, which the graphs' shared pool keeps.
    """
    num_blocks = -(-limits.max_model_len // limits.block_size)
    row_bytes = len(limits.kv_windows) * num_blocks * _TABLE_ITEM_BYTES + logits_row_bytes
    return buckets_up_to(limits.max_num_seqs)[0] * row_bytes + step_bytes + _WORKSPACE_BYTES


@dataclass(slots=True)
class SharedByGraphs:
    """The shared state of all graphs of an engine, created with the first one.

    It is separate per engine: with torch's default capture stream, closing one engine would free the cuBLAS workspace
    that the graphs of another use. Each further stream would cost a workspace, 32 MiB on Hopper.
    """

    stream: Any = None
    pool: Any = None


def capture_graph(run: Callable[[], object], shared: SharedByGraphs) -> Replay:
    """Record the kernels that `run` launches."""
    if shared.stream is None:
        shared.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    shared.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(shared.stream):
        for _ in range(_WARM_UPS):  # kernels are compiled and libraries choose algorithms here
            run()
    torch.cuda.current_stream().wait_stream(shared.stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the program can use the device meanwhile.
    mode = "thread_local"
    with torch.cuda.graph(graph, pool=shared.pool, stream=shared.stream, capture_error_mode=mode):
        run()
    shared.pool = shared.pool or graph.pool()
    return graph.replay


def renew_generator(device: torch.device) -> None:
    """Make the device's default generator usable after a failed capture, which leaves its state captured.

    Otherwise the next random number that torch draws there, for any model of the process, raises "Offset increment
    outside graph capture" (torch 2.11).
    """
    if device.type == "cuda":
        default = torch.cuda.default_generators[device.index or 0]
        default.graphsafe_set_state(torch.Generator(device).manual_seed(default.initial_seed()))


class DecodeGraphs:
    """Graphs for steps in which every row has one token."""

    replays = True

    def __init__(
        self,
        forward: Forward,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        adapter_slots: int = 0,
    ) -> None:
        """`adapter_slots`: of the model's layers; 0: steps with adapters run without graphs."""
        if max_num_seqs > _MAX_ROWS:
            message = "steps of more than %d sequences run without CUDA graphs; max_num_seqs is %d"
            logger.warning(message, _MAX_ROWS, max_num_seqs)
        self._forward = forward
        self._max_model_len = max_model_len
        buckets = buckets_up_to(max_num_seqs)
        self._buckets = {False: buckets, True: buckets} if adapter_slots else {False: buckets}
        """By whether a step has adapters."""
        self._replays: dict[tuple[bool, int], Replay] = {}
        self._inputs = _static_inputs(buckets[0], -(-max_model_len // block_size), max_model_len, device)
        self._adapter_slots = adapter_slots
        if adapter_slots:
            self._inputs.adapters = _no_adapters(buckets[0], adapter_slots, device)
        own = self._inputs.metadata
        own.others = [
            replace(own, block_tables=own.block_tables.clone(), slot_mapping=own.slot_mapping.clone())
            for _ in range(1, num_groups)
        ]
        self._logits: torch.Tensor | None = None

    def capture(self) -> str | None:
        """Capture every bucket. A model whose forward pass can't be captured runs without graphs.

        Returns:
            Which graphs are missing; None if there are all.
        """
        started, shared, missing = time.monotonic(), SharedByGraphs(), None
        for has_adapters, buckets in self._buckets.items():
            try:
                for bucket in buckets:
                    run = self._run(bucket, has_adapters=has_adapters)
                    self._replays[has_adapters, bucket] = capture_graph(run, shared)
            except RuntimeError as error:
                missing = f"{NO_GRAPHS} of steps with adapters" if has_adapters else NO_GRAPHS
                logger.warning("%s: the forward pass can't be captured: %s", missing, error)
                self._buckets = {False: self._buckets[False]} if has_adapters else {}
                self._replays = {
                    key: value for key, value in self._replays.items() if key[0] in self._buckets
                }
                renew_generator(self._inputs.input_ids.device)
                break
        logger.info("%d CUDA graphs captured in %.1f s", len(self._replays), time.monotonic() - started)
        return missing

    def covers(self, plan: StepPlan) -> bool:
        """Return True if a graph can run this plan."""
        if plan.has_media:
            return False
        buckets = self._buckets.get(plan.has_adapters, [])
        return 0 < len(plan.work) <= max(buckets, default=0) and all(
            work.num_tokens == 1 and not work.is_scored for work in plan.work
        )

    def run(self, plan: StepPlan, inputs: StepInputs, work: list[SampleWork]) -> Forwarded:
        """Return logits that are valid until the next step.

        Args:
            plan: one that a graph can run.
            inputs: padded to its bucket.
        """
        static, metadata = self._inputs, inputs.metadata
        bucket = len(inputs.input_ids)
        assert (plan.has_adapters, bucket) in self._replays, f"{bucket} rows are not a bucket"
        static.input_ids[:bucket].copy_(inputs.input_ids)
        static.positions[:bucket].copy_(inputs.positions)
        static.metadata.seq_lens[:bucket].copy_(metadata.seq_lens)
        for group in range(1 + len(metadata.others)):
            target, source = static.metadata.of_group(group), metadata.of_group(group)
            target.slot_mapping[:bucket].copy_(source.slot_mapping)
            width = source.block_tables.shape[1]
            target.block_tables[:bucket, :width].copy_(source.block_tables)
        if static.adapters is not None and inputs.adapters is not None:
            _copy_adapters(static.adapters, inputs.adapters)
        self._replays[plan.has_adapters, bucket]()
        assert self._logits is not None
        count = len(plan.samples)
        return Forwarded(
            self._logits[:count] if are_first_tokens(plan) else self._logits[inputs.logits_indices]
        )

    def _run(self, bucket: int, *, has_adapters: bool) -> Callable[[], None]:
        inputs = _first_rows(self._inputs, bucket, self._max_model_len)
        if has_adapters and (whole := self._inputs.adapters) is not None:
            tiles = whole.tiles[: most_tiles(bucket, self._adapter_slots)]
            inputs.adapters = AdapterRows(whole.slots[:bucket], whole.order[:bucket], tiles)

        def run() -> None:
            logits = self._forward(inputs)
            if self._logits is None:  # the largest bucket's warm-up comes first
                self._logits = torch.empty_like(logits)
            # One tensor for all buckets: separate logits would exist as long as their graph.
            self._logits[:bucket].copy_(logits)

        return run


def _static_inputs(rows: int, max_blocks: int, max_model_len: int, device: torch.device) -> StepInputs:
    """Return inputs of padding only: rows of length 0, slots that are never written."""

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    metadata = AttentionMetadata(
        block_tables=zeros(rows, max_blocks, dtype=torch.int32).fill_(NULL_BLOCK),
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device),
        seq_lens=zeros(rows, dtype=torch.int32),
        slot_mapping=zeros(rows, dtype=torch.int64).fill_(-1),
        query_lens_host=[1] * rows,
        seq_lens_host=[max_model_len] * rows,
        num_decode_rows=rows,
        max_query_len=1,
        max_seq_len=max_model_len,
    )
    ids = zeros(rows, dtype=torch.int64)
    return StepInputs(ids, zeros(rows, dtype=torch.int64), ids[:0], ids[:0], ids[:0], metadata)


def _no_adapters(rows: int, num_slots: int, device: torch.device) -> AdapterRows:
    """Return rows without adapters, with tiles that have no rows."""
    slots = torch.full((rows,), NO_ADAPTER, dtype=torch.int32, device=device)
    tiles = torch.zeros(most_tiles(rows, num_slots), 3, dtype=torch.int32, device=device)
    return AdapterRows(slots, torch.zeros_like(slots), tiles)


def _copy_adapters(static: AdapterRows, given: AdapterRows) -> None:
    """Copy a step's adapters; tiles of earlier steps have no rows any more."""
    static.slots[: len(given.slots)].copy_(given.slots)
    static.order[: len(given.order)].copy_(given.order)
    static.tiles[: len(given.tiles)].copy_(given.tiles)
    static.tiles[len(given.tiles) :].zero_()


def _first_rows(inputs: StepInputs, count: int, max_model_len: int) -> StepInputs:
    metadata = _first_of(inputs.metadata, count, max_model_len)
    metadata.others = [_first_of(other, count, max_model_len) for other in inputs.metadata.others]
    none = inputs.logits_indices
    return StepInputs(inputs.input_ids[:count], inputs.positions[:count], none, none, none, metadata)


def _first_of(whole: AttentionMetadata, count: int, max_model_len: int) -> AttentionMetadata:
    return AttentionMetadata(
        block_tables=whole.block_tables[:count],
        query_start_loc=whole.query_start_loc[: count + 1],
        seq_lens=whole.seq_lens[:count],
        slot_mapping=whole.slot_mapping[:count],
        query_lens_host=[1] * count,
        seq_lens_host=[max_model_len] * count,
        num_decode_rows=count,
        max_query_len=1,
        max_seq_len=max_model_len,  # sizes the grid: the longest sequence of any replay
    )
