"""The engine's settings: the user's, and the scheduler's resolved ones."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pagemill.bounds import ADAPTER_NAME, ADAPTER_NAME_RULE, MODEL_NAME, MODEL_NAME_RULE, Range
from pagemill.chat.families import ToolParser
from pagemill.chat.thinking import ReasoningParser
from pagemill.engine.errors import AdapterError, ConfigError, complaint

if TYPE_CHECKING:
    from pydantic import TypeAdapter


_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]+")

MAX_KV_BLOCKS = 2**24
"""The scheduler keeps an object for each, and kernels index them with 32-bit numbers."""
MAX_SERVED_NAMES = 32
"""Each is a lane that every pull looks at."""
_MAX_ADAPTED_LANES = 1024
_Blocks = Annotated[int, Range(2, MAX_KV_BLOCKS)]  # one is reserved
_Bytes = Annotated[int, Range(1, 2**46)]
_Sequences = Annotated[int, Range(1, 2**16)]
_Tokens = Annotated[int, Range(1, 2**24)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The user's settings; None and "auto" are resolved when the model is loaded, into other objects."""

    model: str
    """A folder, a .gguf file, `org/name[@revision]` of the Hugging Face Hub, `modelscope:org/name[@revision]`,
    `smollm2` (the packaged model) or `echo` (no model at all)."""
    served_model_name: tuple[str, ...] = ()
    """The names that jobs may use, the main one first; a text has them apart by commas or spaces. Empty: the
    repository's name, the folder's, or the file's without its end."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights from the directory's config.json, for benchmarks."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """auto: the checkpoint's on CUDA. On CPU bfloat16 for such a checkpoint, unless it is quantised, where the CPU
    multiplies these numbers (AVX-512 BF16), else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seeds requests that have no seed."""
    block_size: Annotated[int, Range(1, 1024)] = 16
    """Tokens per KV block. Any number is valid; a power of two saves the GPU's kernels divisions."""
    num_kv_blocks: _Blocks | None = None
    """KV blocks in the pool; None: from kv_cache_memory_bytes or the device's free memory."""
    kv_cache_memory_bytes: _Bytes | None = None
    """Bytes for the KV cache; None on CPU: a quarter of the available RAM, at most 4 GiB."""
    gpu_memory_utilization: Annotated[float, Range(1e-3, 1.0)] = 0.9
    """Share of the device's memory for weights, activations and KV cache together."""
    max_model_len: Annotated[int, Range(1, 2**31 - 1)] | None = None
    """Longest prompt + output in tokens; None: the model's context length."""
    max_num_seqs: _Sequences | None = None
    """Sequences in one step; None: 64 on CPU, 256 on CUDA."""
    max_num_batched_tokens: _Tokens | None = None
    """Token budget of a step; None: 512 on CPU, 8192 on CUDA."""
    long_prefill_token_threshold: Annotated[int, Range(0, 2**24)] = 0
    """The most prompt tokens of one request in a step; 0: limited by the budget alone."""
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    """Plan step N+1 while step N runs (depth 1). None: off on CPU, on on CUDA."""
    num_speculative_tokens: Annotated[int, Range(0, 64)] | None = None
    """The most tokens that are drafted for a row in a step, where drafts pay; they change no output. 0: none. None: 8
    on CPU, 0 with async_scheduling, which leaves no time to draft."""
    pad_to_bucket: bool | None = None
    """Pad a step's rows and tokens to a bucket size, as CUDA graphs need. None: off on CPU."""
    stage_inputs: bool | None = None
    """One copy to the device per step instead of one per array. None: off on CPU, on on CUDA."""
    enforce_eager: bool = False
    """Disable CUDA graphs."""
    batch_invariant: bool = False
    """Every request's numbers are the same to the last bit, alone or batched, however it is chunked,
    preempted or resumed; slower. CPU only; float32, or bfloat16 where the CPU multiplies it."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = "auto"
    """Storage format of keys and values; auto: the model's dtype. int8 and fp8 (e4m3) carry a scale per token
    and head; fp8 on CUDA needs compute capability 8.9."""
    quantization: Literal["int8", "fp8"] | None = None
    """int8: products of 8-bit integers, weights and activations; fp8: of e4m3 numbers, on GPUs of compute capability
    8.9 or newer. A scale per output channel and per token, and on CPU per 32 inputs of these."""
    swap_space_gib: Annotated[float, Range(0.0, 1024.0)] = 0.0
    """Host memory for the KV blocks of preempted sequences; 0: they are always recomputed."""
    tensor_parallel_size: Annotated[int, Range(1, 64)] = 1
    """Processes that share each layer's work, one per GPU; on CPU they share its cores. Memory settings are
    per process, except swap_space_gib, which is the total."""
    verify: bool = True
    """Compare a model that no registered family describes with transformers' own forward pass, at its first start."""
    skip_tokenizer_init: bool = False
    """Serve token ids only."""
    chat_template: str | None = None
    """A Jinja file, or the name of one of the model's templates; None: the model's own."""
    tool_call_parser: ToolParser | None = None
    """The syntax of the model's tool calls; None: what its chat template shows."""
    reasoning_parser: ReasoningParser | None = None
    """The tags around the model's thinking; None: those in its chat template."""
    num_threads: Annotated[int, Range(1, 1024)] | None = None
    """CPU threads for the model; None: torch's default."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that jobs may name, each NAME=FOLDER; a text has them apart by spaces."""
    max_adapters: Annotated[int, Range(0, 256)] = 64
    """Names of adapters. Each is a lane that every pull looks at."""
    adapter_slots: Annotated[int, Range(1, 256)] = 16
    """Adapters in memory; the one that was used longest ago makes room."""
    adapter_memory_bytes: _Bytes | None = None
    """Bytes for the adapters in memory; None: an eighth of the available memory, at most 1 GiB."""
    max_adapter_rank: Annotated[int, Range(1, 512)] = 64
    """Adapters of a larger rank are refused."""

    def __post_init__(self) -> None:
        """Check every option against its annotation. Raises ConfigError, which names the option."""
        try:
            object.__setattr__(self, "model", os.fspath(self.model))
        except TypeError:
            raise ConfigError("model: it should be a name or a path", setting="model") from None
        if not 0 < len(self.model) <= 4096:
            raise ConfigError("model: it should have 1 to 4096 characters", setting="model")
        object.__setattr__(self, "served_model_name", _served_names(self.served_model_name))
        object.__setattr__(self, "adapters", _split(self.adapters))
        if find_spec("pydantic") is not None:  # a machine that only tests kernels may lack it
            _hold_to_annotations(self)
        for text in self.adapters:
            parse_adapter(text)
        template = self.chat_template
        is_name = template is None or _TEMPLATE_NAME.fullmatch(template)
        if not is_name and not Path(template or "").expanduser().is_file():
            message = f"chat_template: there is no file {str(template)[:100]!r}"
            raise ConfigError(message, setting="chat_template")
        lanes = max(1, len(self.served_model_name)) * self.max_adapters
        if lanes > _MAX_ADAPTED_LANES:
            raise ConfigError(
                f"max_adapters: {self.max_adapters} under {len(self.served_model_name)} names of the model are {lanes} "
                f"lanes, more than {_MAX_ADAPTED_LANES}",
                setting="max_adapters",
            )
        size = self.tensor_parallel_size
        # Bitwise tiers promise an order of sums that ranks don't keep; only rank 0 has a pool of adapters.
        for name in ("batch_invariant", "adapters"):
            value = getattr(self, name)
            if size > 1 and value:
                message = f"{name}={value!r} with tensor_parallel_size={size} is not supported"
                raise ConfigError(message, setting=name)


def parse_adapter(text: str) -> tuple[str, str]:
    """Split `name=source`. Raises `AdapterError`."""
    name, separator, source = text.partition("=")
    if not separator or not source:
        raise AdapterError(f"adapters: {text[:100]!r} is not NAME=FOLDER", "adapters")
    if not ADAPTER_NAME.fullmatch(name):
        raise AdapterError(f"adapters: {name[:100]!r} won't do: {ADAPTER_NAME_RULE}", "adapters")
    return name, source


def _split(given: object) -> object:
    return tuple(given.split()) if isinstance(given, str) else given


def _served_names(given: object) -> object:
    """Split a text into distinct names. Raises ConfigError for none, too many, and what no job could ask for."""
    names = given.replace(",", " ").split() if isinstance(given, str) else given
    if names == () or not isinstance(names, list | tuple):
        return names  # the default, or refused for its type
    wrong = next((name for name in names if not (isinstance(name, str) and MODEL_NAME.fullmatch(name))), None)
    if not 0 < len(names) <= MAX_SERVED_NAMES or wrong is not None:
        reason = (
            f"{wrong!r} won't do: {MODEL_NAME_RULE}"
            if wrong
            else f"it should be 1 to {MAX_SERVED_NAMES} names"
        )
        raise ConfigError(f"served_model_name: {reason}", setting="served_model_name")
    return tuple(dict.fromkeys(names))


def _hold_to_annotations(config: EngineConfig) -> None:
    from pydantic import ValidationError

    for name, validator in _validators().items():
        try:
            value = validator.validate_python(getattr(config, name))
        except ValidationError as error:
            raise ConfigError(f"{name}: {complaint(error)}", setting=name) from None
        object.__setattr__(config, name, value)


@cache
def _validators() -> dict[str, TypeAdapter[Any]]:
    from pydantic import TypeAdapter

    hints = get_type_hints(EngineConfig, include_extras=True)
    return {option.name: TypeAdapter(hints[option.name]) for option in fields(EngineConfig)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDefaults:
    """A device's defaults for settings left open; the fields' own defaults are a CPU's."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    overlapped: bool = False
    """Plan a step while the one before it runs."""
    num_speculative_tokens: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits, all resolved."""

    block_size: int
    num_kv_blocks: int
    """Blocks in the pool, including the null block (id 0)."""
    max_model_len: int
    max_num_seqs: int
    """Rows: sequences in one step."""
    max_num_batched_tokens: int
    """May be smaller than max_num_seqs: rows that do not fit wait for the next step."""
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    """The most drafts for a row; only with depth 0."""
    depth: int = 0
    """Steps in flight while the next is planned: 0 synchronous, 1 overlapped."""
    watermark_ratio: float = 0.01
    """Share of the pool that admission leaves free, so that running rows can grow."""
    eos_token_ids: tuple[int, ...] = ()
    num_host_blocks: int = 0
    """Blocks of swap space."""
    kv_block_bytes: int = 0
    kv_windows: tuple[int | None, ...] = (None,)
    """The window of each group of layers that has blocks of its own; None: its layers read everything."""
    swap_bytes_per_second: float = float("inf")
    """Bandwidth of the link between device and host memory."""


def resolve_max_model_len(config: EngineConfig, context_length: int, longest_context: int | None) -> int:
    """Return the longest prompt + output in tokens: the setting, or the model's context length.

    Raises:
        ConfigError: the setting exceeds the model's longest context; None means that it has no limit.
    """
    asked = config.max_model_len or context_length
    if longest_context is not None and asked > longest_context:
        raise ConfigError(f"max_model_len {asked} is past the model's context of {longest_context}")
    return asked


def resolve_limits(
    config: EngineConfig, max_model_len: int, eos: tuple[int, ...], defaults: StepDefaults
) -> SchedulerConfig:
    """Return the limits for a pool of the configured size, or of none yet."""
    overlapped = defaults.overlapped if config.async_scheduling is None else config.async_scheduling
    num_drafts = config.num_speculative_tokens
    if num_drafts and overlapped:
        message = "num_speculative_tokens: drafts follow tokens that are known; set async_scheduling to false"
        raise ConfigError(message, setting="num_speculative_tokens")
    if num_drafts is None:
        num_drafts = 0 if overlapped else defaults.num_speculative_tokens
    return SchedulerConfig(
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks or 0,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs or defaults.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or defaults.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_prefix_caching=config.enable_prefix_caching,
        num_speculative_tokens=num_drafts,
        depth=1 if overlapped else 0,
        eos_token_ids=eos,
    )
