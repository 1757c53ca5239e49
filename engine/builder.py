"""Assembles an engine: loads the model and resolves every setting left open."""

from __future__ import annotations

import gc
import hashlib
import importlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagemill.common.fingerprint import with_commit
from pagemill.engine.adapters.pool import AdapterLimits, AdapterPool, NoAdapters
from pagemill.engine.adapters.source import obtain_adapter
from pagemill.engine.config import (
    EngineConfig,
    SchedulerConfig,
    StepDefaults,
    parse_adapter,
    resolve_limits,
    resolve_max_model_len,
)
from pagemill.engine.errors import AdapterError, ConfigError, ModelLoadError
from pagemill.engine.models.directory import LocalModel, check_model, obtain_model
from pagemill.engine.models.echo import (
    ECHO_MAX_MODEL_LEN,
    ECHO_MODEL,
    EchoRunner,
    echo_name,
    echo_step_seconds,
    is_echo,
)
from pagemill.engine.models.echo_inputs import EchoInputs
from pagemill.engine.models.source import ModelSource
from pagemill.engine.parts import EngineParts, Tier
from pagemill.engine.pooling.folder import read_pooling_folder
from pagemill.engine.text.sampling_defaults import SamplingDefaults, read_sampling_defaults
from pagemill.engine.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

    from pagemill.engine.devices.backend import DeviceBackend
    from pagemill.engine.execution.media_encoder import MediaEncoder
    from pagemill.engine.execution.parallel.rank_processes import RankProcesses
    from pagemill.engine.execution.prepared_model import PreparedModel
    from pagemill.engine.images.processor import ImageProcessor
    from pagemill.engine.layers.kv_cache_shape import KVCacheShape
    from pagemill.engine.models.loader import LoadedModel
    from pagemill.engine.plan import Executor

logger = logging.getLogger(__name__)

_ECHO_KV_BLOCKS = 4096
_ECHO_BLOCK_BYTES = 2**16
"""The nominal size of a block in the host tier; no data is stored."""


def build_parts(config: EngineConfig, model: LocalModel | None = None) -> EngineParts:
    """Load the configured model. Raises `ConfigError`, mostly `ModelLoadError`.

    Args:
        model: its files, if they are already known.
    """
    return replace(
        _load_parts(config, model),
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )


def _load_parts(config: EngineConfig, model: LocalModel | None) -> EngineParts:
    check_model(config.model)  # fails before torch is loaded
    if is_echo(config.model):
        return _build_echo(config)
    found: Future[LocalModel] | None = None
    if model is None:
        if ModelSource.parse(config.model).is_file:
            found = _obtain_meanwhile(config)
        else:
            model = obtain_runnable(config)  # with the collector on
    from pagemill.engine.devices.early import compiling_early

    with compiling_early(config.device):
        from pagemill.engine.devices.registry import find_device  # imports transformers

        device = find_device(config.device)
        device.tune_process(config.num_threads)
        if found is not None:
            importlib.import_module("pagemill.engine.models.loader")
            model = found.result()
        assert model is not None
        config = located(config, model)
        with _paused_collector():
            is_whole = config.tensor_parallel_size == 1
            parts = _build_model(device, config, None) if is_whole else _build_parallel(device, config)
    return replace(parts, fingerprint=with_commit(parts.fingerprint, model.commit))


def _obtain_meanwhile(config: EngineConfig) -> Future[LocalModel]:
    """Read a GGUF file on a thread; another process does the work, which takes seconds.

    The thread exits with this process, which can be interrupted meanwhile.
    """
    found: Future[LocalModel] = Future()

    def obtain() -> None:
        try:
            found.set_result(obtain_runnable(config))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=obtain, name="pagemill-gguf", daemon=True).start()
    return found


def describe_model(config: EngineConfig) -> str:
    """Return the log line that describes a model's parts on one device, without its weights. Raises `ConfigError`."""
    from pagemill.engine.devices.registry import find_device
    from pagemill.engine.execution.prepared_model import rewrite
    from pagemill.engine.models.loader import load_model

    if not is_echo(config.model) and read_pooling_folder(obtain_model(config.model).directory) is not None:
        return "gives vectors or labels: packed texts, fused linear layers"
    return rewrite(load_model(config, find_device(config.device), is_outline=True), config)[1]


def obtain_runnable(config: EngineConfig) -> LocalModel:
    """Return the model's files, downloaded and converted where needed. Raises `ConfigError`."""

    def check(directory: Path) -> None:  # before weights are downloaded
        from pagemill.engine.runnable import check_config  # imports torch

        check_config(directory)

    model = obtain_model(config.model, check=check)
    logger.info("model: %s", model)
    return model


def located(config: EngineConfig, model: LocalModel) -> EngineConfig:
    """Replace the model's name by its directory: all ranks load the same files, without a request to a hub."""
    names = config.served_model_name or (model.source.served_name,)
    return replace(config, model=str(model.directory), served_model_name=names)


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Pause the collector: it spent a tenth of the startup time walking half a million permanent objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            # Move all objects to the permanent generation unwalked; the next collection would otherwise start
            # with them.
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _build_parallel(device: DeviceBackend, config: EngineConfig) -> EngineParts:
    from pagemill.engine.execution.parallel.rank_processes import RankProcesses
    from pagemill.engine.models.loader import check_split

    check_split(config)
    ranks = RankProcesses(config)
    try:
        return _build_model(device, ranks.config, ranks)
    except BaseException:
        ranks.close()
        raise


def _build_echo(config: EngineConfig) -> EngineParts:
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size}: echo has nothing to split; use 1"
        )
    tokenizer = ByteTokenizer()
    assert tokenizer.eos_token_id is not None
    max_model_len = resolve_max_model_len(config, ECHO_MAX_MODEL_LEN, ECHO_MAX_MODEL_LEN)
    limits = resolve_limits(
        config,
        max_model_len,
        (tokenizer.eos_token_id,),
        StepDefaults(num_speculative_tokens=0),
    )
    limits = replace(limits, num_kv_blocks=limits.num_kv_blocks or _ECHO_KV_BLOCKS)
    return EngineParts(
        executor=EchoRunner(echo_step_seconds(config.model)),
        tokenizer=None if config.skip_tokenizer_init else tokenizer,
        limits=replace(limits, num_host_blocks=int(config.host_cache_gib * 2**30) // _ECHO_BLOCK_BYTES),
        served_models=config.served_model_name or (echo_name(config.model),),
        vocab_size=tokenizer.vocab_size,
        fingerprint=ECHO_MODEL,
        tier="token",
        device="none",
        inputs=EchoInputs,
    )


def _build_model(device: DeviceBackend, config: EngineConfig, ranks: RankProcesses | None) -> EngineParts:
    """Build this process's model: the complete model, or rank 0's share."""
    from pagemill.engine.execution.kernel_check import check_kernels
    from pagemill.engine.execution.kv_cache import resolve_cache_dtype
    from pagemill.engine.execution.model_runner import ModelRunner
    from pagemill.engine.execution.prepared_model import PreparedModel
    from pagemill.engine.execution.rehearsal import step_bytes
    from pagemill.engine.execution.state_pool import with_states
    from pagemill.engine.models.loader import load_model

    group = None if ranks is None else ranks.group
    model = load_model(config, device, group)
    cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, model.dtype)
    max_model_len = resolve_max_model_len(config, model.context_length, model.longest_context)
    shape = replace(model.kv_cache_shape(config.block_size, max_model_len), dtype=cache_dtype)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(model.directory, config.chat_template)
    defaults = read_sampling_defaults(config.generation_config, model.directory)
    if defaults:
        logger.info("requests that do not set them sample with the model's %s", defaults)
    eos = _eos_token_ids(model, tokenizer)
    limits = resolve_limits(config, max_model_len, eos, device.step_defaults)
    limits = with_states(replace(limits, kv_windows=shape.windows), config, shape, device)
    prepared = PreparedModel.from_model(model, config, shape, max_model_len)
    encoder, media_refusal = _media_encoder(config, model)
    replaced_kernels = check_kernels(prepared, config, limits, shape, group)
    room = step_bytes(prepared, config, limits, shape, group)
    if encoder is not None and device.is_apart:
        room += 2 * encoder.max_bytes  # the vectors, and memory to compute them
    limits = _with_blocks(limits, config, shape, device, room)
    if ranks is not None:
        limits = ranks.agree(limits, device)
    place = str(device.device) if ranks is None else f"{config.tensor_parallel_size} x {device.device}"
    _log_cache(f"{model.served_name} on {place}", shape, limits)
    executor: Executor = (runner := ModelRunner(prepared, config, limits, shape, group, encoder))
    lost = [f"{replaced_kernels} kernels replaced by plain torch"] if replaced_kernels else []
    lost += [runner.lost_graphs] if runner.lost_graphs else []
    weight_bytes = model.weight_bytes() + (0 if encoder is None else encoder.weight_bytes)
    if ranks is not None:
        from pagemill.engine.execution.parallel.executor import TensorParallelExecutor

        weight_bytes += ranks.wait_ready()
        executor = TensorParallelExecutor(runner, ranks, device)
    return EngineParts(
        executor=executor,
        tokenizer=tokenizer,
        limits=limits,
        served_models=config.served_model_name,
        vocab_size=model.vocab_size,
        fingerprint=_with_inputs(model.fingerprint, tokenizer if config.chat_template else None, defaults),
        tier=_tier(config, model.dtype, shape.dtype),
        device=str(device.device),
        kv_block_bytes=shape.block_bytes * config.tensor_parallel_size,
        kv_dtype=str(shape.dtype).removeprefix("torch."),
        weight_bytes=weight_bytes,
        model_parts="; ".join([*lost, prepared.parts]),
        replaced_kernels=replaced_kernels,
        has_lost_graphs=runner.lost_graphs is not None,
        encoder=encoder,
        media_refusal=media_refusal,
        defaults=defaults,
        images=None if encoder is None else _image_processor(config, model),
        adapters=_adapter_pool(config, prepared),
        ranks=ranks,
    )


def _with_blocks(
    limits: SchedulerConfig, config: EngineConfig, shape: KVCacheShape, device: DeviceBackend, room: int
) -> SchedulerConfig:
    """Return the limits with the numbers of KV blocks; a step also takes `room` bytes. Raises `ConfigError`."""
    from pagemill.engine.execution.kv_cache import MAX_COPIED_BYTES, num_blocks_for, num_host_blocks_for

    return replace(
        limits,
        num_kv_blocks=num_blocks_for(config, shape, device, room, limits),
        num_host_blocks=num_host_blocks_for(config, shape, device),
        max_host_copies=max(1, MAX_COPIED_BYTES // max(1, shape.block_bytes)),
    )


def _media_encoder(config: EngineConfig, model: LoadedModel) -> tuple[MediaEncoder | None, str]:
    """Return the encoder of a model's media, or None and the reason: texts are served anyway."""
    from pagemill.engine.execution.media_encoder import MediaEncoder
    from pagemill.engine.layers.media_hooks import read_media_steps
    from pagemill.engine.models.vision import load_vision

    if not config.media_cache_bytes:
        return None, "images are disabled: media_cache_bytes is 0"
    dtype = model.device.module_dtype(model.dtype)
    try:
        vision = load_vision(config, model.directory, dtype, model.device)
    except ModelLoadError as error:
        return None, str(error)
    read_media_steps(model.module, vision.num_deep_layers, vision.sections)
    return MediaEncoder(vision, config.media_cache_bytes, model.device.device, dtype), ""


def _image_processor(config: EngineConfig, model: LoadedModel) -> ImageProcessor:
    from pagemill.engine.images.processor import ImageProcessor

    return ImageProcessor(model.directory, max_pixels=config.max_image_pixels)


def _eos_token_ids(model: LoadedModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the EOS ids of the model and of the tokenizer that the model can generate."""
    own = tokenizer.eos_token_id if tokenizer is not None else None
    found = dict.fromkeys((*model.eos_token_ids, *(() if own is None else (own,))))
    known = tuple(token for token in found if 0 <= token < model.vocab_size)
    if len(known) < len(found):
        unknown = sorted(found.keys() - set(known))
        logger.warning("EOS ids %s are not in the model's vocabulary of %d tokens", unknown, model.vocab_size)
    return known


def _log_cache(name: str, shape: KVCacheShape, limits: SchedulerConfig) -> None:
    logger.info(
        "%s: %d KV blocks of %d tokens, %.2f GiB",
        name,
        limits.num_kv_blocks,
        shape.block_size,
        limits.num_kv_blocks * shape.block_bytes / 2**30,
    )
    if shape.state:
        logger.info(
            "recurrent state: %d bytes per sequence, %d sequences (max_num_seqs) and %d cached prefixes, %.2f GiB",
            shape.state_bytes,
            limits.max_num_seqs,
            limits.num_cached_states,
            (limits.max_num_seqs + limits.num_cached_states) * shape.state_bytes / 2**30,
        )
    if (expanded := shape.expanded_block_bytes) is not None:
        logger.info(
            "latents in place of keys and values: %d bytes per token instead of %d",
            shape.block_bytes // shape.block_size,
            expanded // shape.block_size,
        )
    if shape.windows != (None,):
        logger.info("groups of layers with separate blocks, by window: %s", list(shape.windows))


def _adapter_pool(config: EngineConfig, model: PreparedModel) -> AdapterPool | NoAdapters:
    """Return the pool, with the configured adapters. Raises `AdapterError`."""
    from pagemill.engine.devices.adapter_memory import adapter_bytes_for

    if model.adapters is None:
        return NoAdapters(
            f"adapters with tensor_parallel_size={config.tensor_parallel_size} are not supported"
        )
    memory_bytes = adapter_bytes_for(config, model.loaded.device)
    limits = AdapterLimits(config.max_adapters, config.adapter_slots, memory_bytes)
    pool = AdapterPool(model.adapters, limits)
    for text in config.adapters:
        name, source = parse_adapter(text)
        try:
            directory = obtain_adapter(source)
        except AdapterError as error:
            raise AdapterError(f"adapter {name}: {error}") from error
        pool.add(name, directory)
    return pool


def _with_inputs(fingerprint: str, tokenizer: Tokenizer | None, defaults: SamplingDefaults) -> str:
    """Add other inputs of a request's output: a custom chat template, and sampling defaults."""
    added = [] if tokenizer is None or tokenizer.chat_template is None else [tokenizer.chat_template]
    added += [str(defaults)] if defaults else []
    for text in added:
        fingerprint = hashlib.sha256(f"{fingerprint} {text}".encode()).hexdigest()[:16]
    return fingerprint


def _tier(config: EngineConfig, dtype: torch.dtype, cache_dtype: torch.dtype) -> Tier:
    import torch

    if config.batch_invariant:
        return "bitwise"
    is_exact = dtype is cache_dtype is torch.float32 and config.quantization is None
    return "token" if is_exact else "continues"
