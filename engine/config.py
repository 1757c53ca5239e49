"""The engine's settings: the user's, and the scheduler's resolved ones."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pagemill.common.bounds import ADAPTER_NAME, ADAPTER_NAME_RULE, MODEL_NAME, MODEL_NAME_RULE, Range
from pagemill.common.chat.families import ToolParser
from pagemill.common.chat.thinking import ReasoningParser
from pagemill.engine.errors import AdapterError, ConfigError, complaint

if TYPE_CHECKING:
    from pydantic import TypeAdapter


_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]+")

MAX_KV_BLOCKS = 2**24
"""The scheduler keeps an object for each, and kernels index them with 32-bit numbers."""
MAX_CACHED_STATES = 1024
_CACHED_SHARE = 8
"""One part in this many of the KV cache's memory is for cached recurrent states, unless state_cache_bytes is set."""
MAX_SERVED_NAMES = 32
"""Each is a lane that every pull inspects."""
_MAX_ADAPTED_LANES = 1024
_Blocks = Annotated[int, Range(2, MAX_KV_BLOCKS)]  # one is reserved
_Bytes = Annotated[int, Range(1, 2**46)]
_Sequences = Annotated[int, Range(1, 2**16)]
_Tokens = Annotated[int, Range(1, 2**24)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The user's settings; None and "auto" are resolved when the model is loaded, into other objects.

    The docstrings of the fields are the help texts of `pagemill worker`.
    """

    model: str
    """A directory, a .gguf file, `org/name[@revision]` of the Hugging Face Hub, `modelscope:org/name[@revision]`,
    `smollm2` (the packaged model), or `echo` (no model)."""
    served_model_name: tuple[str, ...] = ()
    """Names by which jobs select the model, the main one first, separated by commas or spaces. Default:
    the name of the repository, directory or file."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights, for benchmarks."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of the model. auto: the checkpoint's on CUDA. On CPU, bfloat16 for an unquantized
    bfloat16 checkpoint and a CPU with AVX-512 BF16, otherwise float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device that runs the model. auto: CUDA if there is a GPU."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of requests without one."""
    block_size: Annotated[int, Range(1, 1024)] = 16
    """Tokens per KV block. A power of two is faster on GPUs."""
    num_kv_blocks: _Blocks | None = None
    """KV blocks in the pool. Default: from kv_cache_memory_bytes, or from the device's free memory."""
    kv_cache_memory_bytes: _Bytes | None = None
    """Bytes for the KV cache. Default on CPU: a quarter of the available RAM, at most 4 GiB."""
    gpu_memory_utilization: Annotated[float, Range(1e-3, 1.0)] = 0.9
    """Fraction of the device's memory for weights, activations and KV cache."""
    max_model_len: Annotated[int, Range(1, 2**31 - 1)] | None = None
    """Longest prompt + output, in tokens. Default: the model's context length."""
    max_num_seqs: _Sequences | None = None
    """Sequences in one step. Default: 64 on CPU, 256 on CUDA."""
    max_num_batched_tokens: _Tokens | None = None
    """Token budget of a step. Default: 512 on CPU, 8192 on CUDA."""
    long_prefill_token_threshold: Annotated[int, Range(0, 2**24)] = 0
    """Maximum number of prompt tokens of one request in a step. 0: no limit."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of equal prompt prefixes."""
    state_cache_bytes: Annotated[int, Range(0, 2**46)] | None = None
    """Bytes for states of recurrent layers at the ends of cached prefixes. Default: an eighth of the KV
    cache's memory."""
    async_scheduling: bool | None = None
    """Plan step N+1 while step N runs (depth 1). Default: off on CPU, on on CUDA."""
    num_speculative_tokens: Annotated[int, Range(0, 64)] | None = None
    """Maximum number of tokens drafted per row and step. Default: 8 on CPU; 0 with async_scheduling."""
    pad_to_bucket: bool | None = None
    """Pad a step's rows and tokens to a bucket size, as CUDA graphs require. Default: off on CPU."""
    stage_inputs: bool | None = None
    """One copy to the device per step instead of one per array. Default: off on CPU, on on CUDA."""
    strict_kernels: bool = False
    """Exit at startup if a CUDA kernel fails its comparison with plain torch, which otherwise replaces it, or if CUDA
    graphs cannot be captured."""
    enforce_eager: bool = False
    """Disable CUDA graphs."""
    batch_invariant: bool = False
    """Compute every request bit-identically in any batch. Slower. CPU only: any dtype with AVX2 or AVX-512,
    otherwise float32."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = "auto"
    """Storage format of keys and values. auto: the model's dtype. fp8 (e4m3) on CUDA needs compute capability 8.9."""
    attention_backend: Literal["auto", "triton", "fa3", "flashinfer"] = "auto"
    """Attention kernels on CUDA. auto: triton. fa3: FlashAttention 3 of vLLM's package, on an H100 or H200.
    flashinfer: FlashInfer for prompts. Both for layers that they support."""
    matmul: Literal["auto", "own", "onednn"] = "auto"
    """Matmuls on a CPU: Pagemill's own, or oneDNN's, for which quantized weights are widened. auto: own for AMD and
    quantized weights, otherwise the faster one after a measurement of at most 2 s at the first start."""
    quantization: Literal["int8", "fp8"] | None = None
    """Multiply 8-bit numbers: int8, or fp8 (e4m3) on GPUs of compute capability 8.9 or newer. Default: off."""
    host_cache_gib: Annotated[float, Range(0.0, 1024.0)] = 0.0
    """GiB of host memory for evicted KV blocks. 0: they are recomputed."""
    media_cache_bytes: Annotated[int, Range(0, 2**46)] = 2**29
    """Bytes for encoded images, which later jobs reuse. 0: images are rejected."""
    tensor_parallel_size: Annotated[int, Range(1, 64)] = 1
    """Processes that share each layer's work. Memory settings are per process, except host_cache_gib."""
    verify: bool = True
    """Compare a model without a registered family with transformers at its first start."""
    skip_tokenizer_init: bool = False
    """Serve token ids only."""
    chat_template: str | None = None
    """A Jinja file, or the name of one of the model's templates. Default: the model's own."""
    generation_config: str = "auto"
    """Source of the defaults of sampling fields: auto, the model's generation_config.json; none, Pagemill's own; or a
    folder with another generation_config.json."""
    tool_call_parser: ToolParser | None = None
    """Syntax of the model's tool calls. Default: derived from its chat template."""
    reasoning_parser: ReasoningParser | None = None
    """Tags around the model's reasoning. Default: derived from its chat template."""
    max_image_pixels: Annotated[int, Range(1, 2**30)] = 2**26
    """Maximum number of pixels of an image before it is resized."""
    num_threads: Annotated[int, Range(1, 1024)] | None = None
    """CPU threads for the model. Default: torch's."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters (PEFT) that jobs can name, as NAME=FOLDER, separated by spaces or by repeating the flag."""
    max_adapters: Annotated[int, Range(0, 256)] = 64
    """Maximum number of adapter names."""
    adapter_slots: Annotated[int, Range(1, 256)] = 16
    """Adapters in memory. The least recently used one is evicted."""
    adapter_memory_bytes: _Bytes | None = None
    """Bytes for the adapters in memory. Default: an eighth of the available memory, at most 1 GiB."""
    max_adapter_rank: Annotated[int, Range(1, 512)] = 64
    """Highest rank of an adapter."""

    def __post_init__(self) -> None:
        """Check every option against its annotation. Raises ConfigError, which names the option."""
        try:
            object.__setattr__(self, "model", os.fspath(self.model))
        except TypeError:
            raise ConfigError("model: should be a name or a path", setting="model") from None
        if not 0 < len(self.model) <= 4096:
            raise ConfigError("model: should have 1 to 4096 characters", setting="model")
        object.__setattr__(self, "served_model_name", _served_names(self.served_model_name))
        object.__setattr__(self, "adapters", _split(self.adapters))
        if find_spec("pydantic") is not None:  # a machine that only tests kernels may lack it
            _check_annotations(self)
        names = Counter(parse_adapter(text)[0] for text in self.adapters)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise AdapterError(f"adapters: {repeated[0]} is given more than once", "adapters")
        template = self.chat_template
        is_name = template is None or _TEMPLATE_NAME.fullmatch(template)
        if not is_name and not Path(template or "").expanduser().is_file():
            message = f"chat_template: file {str(template)[:100]!r} does not exist"
            raise ConfigError(message, setting="chat_template")
        given = self.generation_config
        if (
            given not in ("auto", "none")
            and not (Path(given).expanduser() / "generation_config.json").is_file()
        ):
            message = f"generation_config: {given[:100]!r} is not auto, none or a folder with a generation_config.json"
            raise ConfigError(message, setting="generation_config")
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
        raise AdapterError(f"adapters: {name[:100]!r} is not valid: {ADAPTER_NAME_RULE}", "adapters")
    return name, source


def _split(given: object) -> object:
    return tuple(given.split()) if isinstance(given, str) else given


def _served_names(given: object) -> object:
    """Split a text into distinct names. Raises ConfigError for none, too many, and what no job could ask for."""
    names = given.replace(",", " ").split() if isinstance(given, str) else given
    if names == () or not isinstance(names, list | tuple):
        return names  # the default, or rejected for its type
    wrong = next((name for name in names if not (isinstance(name, str) and MODEL_NAME.fullmatch(name))), None)
    if not 0 < len(names) <= MAX_SERVED_NAMES or wrong is not None:
        reason = (
            f"{wrong!r} is not valid: {MODEL_NAME_RULE}"
            if wrong
            else f"should be 1 to {MAX_SERVED_NAMES} names"
        )
        raise ConfigError(f"served_model_name: {reason}", setting="served_model_name")
    return tuple(dict.fromkeys(names))


def _check_annotations(config: EngineConfig) -> None:
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
    """Blocks of the prefix cache's host tier."""
    max_host_copies: int = 2**31
    """Blocks that a step may copy to the host tier."""
    kv_windows: tuple[int | None, ...] = (None,)
    """The window of each group of layers with separate blocks; below 0: chunks; None: its layers read everything."""
    state_bytes: int = 0
    """Of the state that recurrent layers keep of a sequence, in the slot of its row; 0: the model has none.
    A row's state can't return to an earlier token: without drafts and host tier."""
    num_cached_states: int = 0
    """Slots for states at the ends of cached prefixes; 0: a recurrent model has no prefix cache."""


def divide_states(
    num_states: int, max_num_seqs: int, num_cached: int | None, *, has_blocks: bool, is_fixed: bool = False
) -> tuple[int, int]:
    """Divide memory for recurrent states between sequences, cached prefixes and KV blocks, which get the rest.

    Args:
        num_states: states that the memory would hold.
        max_num_seqs: the most sequences.
        num_cached: cached states asked for; None: the default share.
        has_blocks: the model has KV blocks: they get half of what cached states leave.
        is_fixed: memory does not lower `max_num_seqs`.

    Returns:
        max_num_seqs and the number of cached states. Together they may exceed `num_states` if either was asked for.
    """
    cached = min(num_states // _CACHED_SHARE if num_cached is None else num_cached, MAX_CACHED_STATES)
    if not is_fixed:
        max_num_seqs = min(max_num_seqs, (num_states - cached) // (2 if has_blocks else 1))
    return max_num_seqs, cached if num_cached is not None else max(0, min(cached, num_states - max_num_seqs))


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
