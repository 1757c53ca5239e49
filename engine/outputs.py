"""The engine's public output types: request outputs, and snapshots of its state. Plain types, no torch."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

from pagemill.engine.plan import TokenLogprobs

UNKNOWN_TOKEN = 2**31 - 1
"""Represents a token whose id its engine does not report. No vocabulary is that large."""
FinishReason = Literal["stop", "length", "abort", "error"]
Phase = Literal["waiting", "prefill", "decode"]
WaitReason = Literal["budget", "rows", "kv"]
"""The resource that the first waiting request lacks: tokens of the step's budget, a row, or KV blocks."""
StayCause = Literal[
    "adapter", "grammar", "rows", "kv", "budget", "prompt", "decode", "displaced", "preempted", "others"
]
"""The parts of a request's time in the engine; `others` is a count."""
StructuredResult = Literal["valid", "truncated", "invalid"]
LetGo = Literal["released", "lapsed"]
"""Outcome of a request that its engine lost: `released` is not counted, `lapsed` counts as a crash."""
MemoryUse = Literal["weights", "kv", "graphs", "activations", "free"]
PromptSource = Literal["computed", "prefix_cache"]


@dataclass(slots=True)
class SampleState:
    """A sample's progress: stored in a checkpoint and accepted by `add_request(resume=...)`."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    text: str = ""
    """The text that was committed with them."""


@dataclass(slots=True)
class CompletionDelta:
    """One sample's new output from a step."""

    index: int
    token_ids: list[int]
    text: str
    """New text. A possible start of a stop string or an incomplete character is held back until decided."""
    offset: int
    """Number of output tokens of the sample before this delta (including resumed ones)."""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the sample; None for EOS and for length."""
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of all its tokens; set if samples, beams or labels are ranked."""
    label_probs: tuple[float, ...] | None = None
    """The probability of each label of the choice, in its order, if requested; with the last tokens."""
    label: int | None = None
    """The index of the most probable label, which is the text."""


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The result rows of a `Pool` task, in the order of its texts."""

    width: int
    data: bytes
    """float32, little-endian, row after row."""


@dataclass(slots=True)
class RequestOutput:
    """One request's output from a step: deltas, progress, and finally usage or an error."""

    request_id: str
    phase: Phase
    prompt_tokens_done: int
    prompt_tokens: int
    deltas: list[CompletionDelta] = field(default_factory=list)
    finished: bool = False
    usage: Usage | None = None
    """Set on the last output."""
    error: str | None = None
    error_code: str | None = None
    ttft_s: float | None = None
    """Seconds from add_request to the first token; set on the last output."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token, None for the first, if requested; set on the last output."""
    pooled: PooledRows | None = None
    """The result of a `Pool` task; set on the last output."""
    device_s: float = 0.0
    """The request's share of the steps' time in seconds; set on the last output by the code that times steps."""
    stay: dict[StayCause, int] | None = None
    """Milliseconds by cause, and the mean number of other sequences while it decoded, in tenths; set on the last
    output."""
    warnings: tuple[str, ...] = ()
    """Warnings about the output for the caller; set on the last one."""
    let_go: LetGo | None = None
    """Set on the last output of an unfinished request that must run on another engine or later."""


class Histogram:
    """Non-cumulative bucket counts; an observation costs one bisection and no lock.

    `bounds` are inclusive upper bounds; one more bucket counts larger values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self.bounds, tuple(self.counts), self.total)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Per bucket, not cumulative; the last entry is the overflow bucket."""
    total: float


LabelValues = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """The block pool at one moment. free + cached + active + reserved == capacity, always."""

    capacity_blocks: int = 0
    block_size: int = 1
    free_blocks: int = 0
    """No reference, no hash."""
    cached_blocks: int = 0
    """No reference, but hashed: reusable by a prefix hit, evictable."""
    active_blocks: int = 0
    """At least one reference."""
    reserved_blocks: int = 0
    """The null block, and blocks that wait for in-flight steps to retire."""
    shared_blocks: int = 0
    """At least two references."""
    block_references: int = 0
    """Sum of reference counts; references / active = sharing ratio."""
    filled_slots: int = 0
    """Token slots in use in active blocks; a shared block counts once."""
    allocations: int = 0
    frees: int = 0
    evictions: int = 0
    allocation_failures: int = 0
    cow_copies: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    block_bytes: int = 0
    """Bytes of one block over all layers of a group, scales included; 0 without a device cache."""
    dtype: str = ""
    """The storage format of keys and values."""
    host_capacity_blocks: int = 0
    """Blocks of the host tier; 0 if it is disabled."""
    host_used_blocks: int = 0
    host_stored_blocks: int = 0
    """Blocks copied to the host tier."""
    host_loaded_blocks: int = 0
    """Blocks copied back."""
    host_evictions: int = 0
    host_skipped_blocks: int = 0
    """Blocks that were not stored: the limit per step, or a tier that is too small for the step."""
    host_hit_tokens: int = 0
    """Tokens of prefix hits that came from the host tier."""
    window_frees: int = 0
    """Blocks freed because their layers' window had left them behind."""
    groups: tuple[tuple[int | None, int], ...] = ()
    """For each group of layers with separate blocks: its window (below 0: chunks, None: all) and active blocks."""
    state_slots: int = 0
    """Slots for the state of recurrent layers, of rows and of cached prefixes; 0: the model has no such layers."""
    active_state_slots: int = 0
    """Slots of running sequences."""
    cached_state_slots: int = 0
    """Slots with a state at the end of a cached prefix."""
    state_bytes: int = 0
    """Bytes of a slot."""

    def active_by_window(self) -> list[tuple[int | None, int]]:
        """Return (tokens of the window or chunk, active blocks), with groups of equal size combined."""
        windows: dict[int | None, int] = {}
        for window, blocks in self.groups:
            tokens = abs(window) if window else window
            windows[tokens] = windows.get(tokens, 0) + blocks
        return list(windows.items())

    @property
    def utilization(self) -> float:
        return self.active_blocks / self.capacity_blocks if self.capacity_blocks else 0.0

    @property
    def waste(self) -> float:
        slots = self.active_blocks * self.block_size
        return 1.0 - self.filled_slots / slots if slots else 0.0


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The state of every block of the pool at one moment, for display."""

    states: bytes
    """A letter per block, by block id: f free, c cached, a active, s shared (active, with two references or more),
    r reserved."""
    taken_at: float
    """`time.monotonic()`."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    running: int = 0
    """Sequences that hold a row."""
    waiting: int = 0
    """Requests that wait for blocks, a row or budget."""
    waiting_for: WaitReason = "budget"
    """The reason why the first of them was not admitted; the rest wait behind it."""
    displaced: int = 0
    """Preemptions in favor of urgent requests; also counted as preemptions."""
    preemptions: int = 0
    preempted_tokens: int = 0
    """Computed tokens of preempted sequences (prefix hits not deducted)."""
    recomputed_tokens: int = 0
    """Tokens computed again (prefix hits deducted)."""
    steps_failed: int = 0
    invalid_logits: int = 0
    """Rows with non-finite logits."""
    discarded_tokens: int = 0
    """Sampled tokens discarded because their sequence had already ended (a stop detected one step late)."""
    drafted_tokens: int = 0
    """Tokens computed before it was known whether they would be sampled."""
    accepted_tokens: int = 0
    """Drafted tokens that were sampled."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The served model and its settings; constant for the engine's lifetime."""

    model: str = ""
    device: str = ""
    tier: str = ""
    """Exactness tier: bitwise, token or continues."""
    fingerprint: str = ""
    max_model_len: int = 0
    max_num_seqs: int = 0
    replaced_kernels: int = 0
    """Operators computed by plain torch because their kernels failed the check at startup."""
    has_lost_graphs: bool = False
    """True if CUDA graphs could not be captured."""


@dataclass(slots=True)
class StepStats:
    """Counted on the engine's thread; a snapshot holds a copy."""

    finished: int = 0
    replayed: int = 0
    """Steps replayed by a CUDA graph; the others ran eagerly."""
    sharing_rows: int = 0
    """Sum of rows with one token that start with the same blocks as another row: a CPU reads these once for both."""
    computed_tokens: int = 0
    """Tokens that went through the model, including recomputed ones."""
    busy_seconds: float = 0.0
    """Time inside steps."""
    last_time: float = 0.0
    """`time.monotonic()` when the last step finished; 0.0 before the first."""
    peak_utilization: float = 0.0
    """The highest utilization of the KV cache in any step."""


@dataclass(slots=True)
class RequestStats:
    """Counted on the engine's thread; a snapshot holds a copy."""

    prompt_tokens: int = 0
    """Prompt tokens of admitted requests."""
    generated_tokens: int = 0
    prompt_tokens_by_source: dict[PromptSource, int] = field(
        default_factory=lambda: {"computed": 0, "prefix_cache": 0}
    )
    """Prompt tokens of requests at their first admission, by the source of their KV."""
    pooled_texts: dict[str, int] = field(default_factory=lambda: {"embed": 0, "classify": 0, "rerank": 0})
    """task -> texts that got a vector, labels or a score."""
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    """finish reason -> requests (a request counts under its first sample's reason)."""
    structured_outputs: dict[StructuredResult, int] = field(
        default_factory=lambda: {"valid": 0, "truncated": 0, "invalid": 0}
    )
    """Ended samples with structured_outputs. truncated: max_tokens came first; invalid: the output does not
    match, or nothing could be sampled."""


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """The cache of compiled schemas."""

    hits: int = 0
    misses: int = 0


@dataclass(slots=True)
class MediaStats:
    """The encoder of pictures and its cache. Counted on the engine's thread; a snapshot holds a copy."""

    encoded: int = 0
    """Pictures that the encoder read."""
    cache_hits: int = 0
    """Pictures of requests whose vectors, or whose KV, were cached."""
    encoder_seconds: float = 0.0
    waiting: int = 0
    """Requests with pictures to encode."""
    used_bytes: int = 0
    """Bytes of the cached vectors."""
    capacity_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """The adapters that requests can name, and those in memory."""

    named: int = 0
    resident: int = 0
    slots: int = 0
    """Maximum number of resident adapters."""
    used_bytes: int = 0
    capacity_bytes: int = 0
    waiting: int = 0
    """Requests whose adapter is not in memory."""
    loads: int = 0
    evictions: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    """name -> accepted requests, for the existing adapters."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One immutable snapshot, taken by the engine's own thread between two steps."""

    kv: KVCacheStats = field(default_factory=KVCacheStats)
    scheduler: SchedulerStats = SchedulerStats()
    loaded: LoadedModel = LoadedModel()
    steps: StepStats = field(default_factory=StepStats)
    requests: RequestStats = field(default_factory=RequestStats)
    grammars: GrammarStats = GrammarStats()
    adapters: AdapterStats = field(default_factory=AdapterStats)
    media: MediaStats = field(default_factory=MediaStats)
    memory_bytes: dict[MemoryUse, int] = field(default_factory=dict)
    """The device's memory by use, as far as known."""
    known: frozenset[str] | None = None
    """The names of the known KV cache metrics; None: all of them."""
    blocks: BlockMap | None = None
    """The latest map of the block pool, while requested (`Engine.watch_blocks`)."""
    histograms: dict[str, dict[LabelValues, HistogramSnapshot]] = field(default_factory=dict)
    """name -> label values (() when unlabeled) -> snapshot. Names and labels: step_seconds (phase: schedule,
    prepare, forward, sample, output; kind), step_tokens (kind), step_utilization, step_budget_use, batch_size,
    time_to_first_token_seconds, inter_token_latency_seconds, time_per_output_token_seconds, request_seconds,
    request_wait_seconds, request_prefill_seconds, request_decode_seconds, request_inference_seconds,
    prompt_tokens, generated_tokens, longest_sample_tokens, request_samples, request_max_tokens,
    request_peak_blocks, grammar_compile_seconds, block_lifetime_seconds, block_idle_seconds,
    block_reuse_gap_seconds."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The engine's current headroom for admission."""

    free_rows: int
    """Sequences that could start now."""
    available_blocks: int
    """Free + cached blocks, less the watermark."""
    block_size: int
    waiting: int
    """Requests already queued inside the engine."""
    block_limits: tuple[int | None, ...] = (None,)
    """Maximum number of blocks that a sequence holds at the same time per group of layers; None: no limit."""
    rows: int | None = None
    """Present limit of running sequences, if it varies. Urgent requests then do not preempt others."""

    def blocks_for(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a sequence of this many tokens holds."""
        columns = -(-num_tokens // self.block_size)
        return sum(columns if limit is None else min(columns, limit) for limit in self.block_limits)
