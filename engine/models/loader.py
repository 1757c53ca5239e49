"""Loads a model by name into a module that uses the paged cache."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from pagemill.engine.config import EngineConfig, resolve_max_model_len
from pagemill.engine.devices.backend import DeviceBackend
from pagemill.engine.devices.registry import find_device
from pagemill.engine.errors import ConfigError, ModelLoadError
from pagemill.engine.layers.attention import PAGED_ATTENTION, PAGED_IN_ORDER
from pagemill.engine.layers.int8_products import quantization_scheme
from pagemill.engine.layers.kv_cache_shape import KVCacheShape, layer_groups
from pagemill.engine.layers.library import causal_lm_class
from pagemill.engine.layers.linear import Matmul
from pagemill.engine.layers.observation import AttentionShape
from pagemill.engine.layers.positions.rope import (
    check_rope,
    depends_on_length,
    fix_frequencies,
    stretched_context,
)
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.layers.recurrent import recurrent_kinds
from pagemill.engine.layers.share import ShardingPlan, Share, TensorSplit, planned_split
from pagemill.engine.models.checkpoint import (
    names_scheme,
    read_config,
    read_scheme,
    read_tensors,
    weight_files,
)
from pagemill.engine.models.directory import model_directory
from pagemill.engine.models.expert_tensors import ExpertTensors
from pagemill.engine.models.families.family import Family, unchanged
from pagemill.engine.models.families.generic import attention_shape
from pagemill.engine.models.families.registry import find_family
from pagemill.engine.models.layer_windows import layer_windows
from pagemill.engine.models.plausibility import check_dtypes, check_packing, check_sizes
from pagemill.engine.models.quantized.reader import check_quantized, join_parts, place, placeholders, widened
from pagemill.engine.models.quantized.scheme import Scheme
from pagemill.engine.models.sharding import finish_sharding, sharded_class
from pagemill.engine.models.source import ModelSource
from pagemill.engine.models.split_sizes import SplitSizes
from pagemill.engine.text.tokenizer import generation_eos_token_ids

logger = logging.getLogger(__name__)

_CONTEXT_FIELDS = ("max_position_embeddings", "max_seq_len")
_UNBOUNDED_CONTEXT = 8192
"""Context of models without a longest sequence: all layers are recurrent, or positions are unlimited."""
_SMALL = {"num_hidden_layers": 1, "vocab_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16}
"""Sizes on which attention does not depend."""
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    module: torch.nn.Module
    family: Family
    directory: Path
    served_name: str
    dtype: torch.dtype
    """The dtype of matmuls, and by default of the KV cache; the module's tensors can be wider."""
    device: DeviceBackend
    vocab_size: int
    context_length: int
    """Longest sequence served unless max_model_len is set."""
    longest_context: int | None
    """The limit of max_model_len; None: no limit."""
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    share: Share
    """The rank's part of the model."""
    attention: AttentionShape | None = None
    """Observed attention; None: as configured."""
    matmul: Matmul = "own"
    """Whose kernels multiply by unquantized weights on a CPU."""

    @property
    def num_heads(self) -> int:
        """Number of attention heads of this share."""
        if self.attention is not None:
            return self.attention.num_heads
        config: Any = self.module.config
        return int(config.num_attention_heads) // self.share.size

    def kv_cache_shape(self, block_size: int, max_model_len: int) -> KVCacheShape:
        """The cache of this share's KV heads. Call it before modules are rewritten."""
        config: Any = self.module.config
        if (seen := self.attention) is not None:
            groups = layer_groups(seen.windows, max_model_len)
            return KVCacheShape(
                len(seen.windows), seen.num_kv_heads, seen.head_dim, block_size, self.dtype, groups,
                latent=seen.latent, state=seen.state,
            )  # fmt: skip
        groups = layer_groups(layer_windows(self.module, self.family.decoder), max_model_len)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = self.share.of_kv_heads(self.family.num_kv_heads(config))
        return KVCacheShape(
            config.num_hidden_layers, heads.stop - heads.start, head_dim, block_size, self.dtype, groups
        )

    def weight_bytes(self) -> int:
        """Bytes of all used weights; layers store prepacked weights outside of their parameters."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        for layer in self.module.modules():
            tensors += [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())


def check_split(config: EngineConfig) -> None:
    """Check that the model can be spread over the configured ranks, before starting their processes.

    Raises:
        ConfigError: the model does not have a plan, a size is not divisible, or there are fewer GPUs than ranks.
        ModelLoadError: the model does not exist, or its architecture is not supported.
    """
    size = config.tensor_parallel_size
    directory = model_directory(config.model)
    family = find_family(raw := read_config(directory))
    _refuse_unshown(family, config)
    model_config = _build_config(family, raw, directory)
    scheme, device = read_scheme(directory), find_device(config.device)
    SplitSizes.from_config(
        model_config,
        _tensor_split(family, model_config),
        family.num_kv_heads(model_config),
        device.int8_input_group if config.quantization == "int8" else 1,
    ).check(size)
    device.check(config, resolve_dtype(config, model_config, device, is_quantized=scheme is not None))


def _tensor_split(family: Family, model_config: Any) -> TensorSplit:
    return family.split or planned_split(model_config)


def load_model(
    config: EngineConfig, device: DeviceBackend, group: RankGroup | None = None, *, is_outline: bool = False
) -> LoadedModel:
    """Load the complete model or a rank's share onto the device, ready for a forward pass.

    Args:
        is_outline: one layer of random weights with few tokens, to find out how the complete model would run.

    Raises:
        ModelLoadError: the model does not exist, is not supported or has an unreadable checkpoint.
        ConfigError: the device lacks a requested feature, or max_model_len is past the model's context.
    """
    if group is not None:
        device.claim(group.rank)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    directory = model_directory(config.model)
    raw, scheme = read_config(directory), read_scheme(directory)
    family = find_family(raw)
    _refuse_unshown(family, config)
    model_config = _build_config(family, raw, directory)
    dtype = resolve_dtype(config, model_config, device, is_quantized=scheme is not None)
    device.check(config, dtype)
    if is_outline:
        config = replace(config, load_format="dummy")
        model_config.num_hidden_layers, model_config.vocab_size, model_config.pad_token_id = 1, 16, 0
    context_length = _context_length(family, model_config)
    longest = None if family.extrapolates(model_config) else stretched_context(model_config, context_length)
    max_model_len = resolve_max_model_len(config, context_length, longest)
    if scheme is not None:
        logger.info("quantized checkpoint: %s", scheme.describe())
    module = _load_module(config, family, model_config, device.module_dtype(dtype), device, group)
    fix_frequencies(module, max_model_len)
    _skip_padding_checks(module)
    module = module.to(device.device).eval()
    module.requires_grad_(False)
    attention = attention_shape(module, caches_latents=device.caches_latents) if family.is_generic else None
    fixed_length = max_model_len if depends_on_length(model_config) else 0
    matmul = device.choose_matmul(config, module, dtype, is_quantized=scheme is not None)
    return LoadedModel(
        module=module,
        family=family,
        directory=directory,
        served_name=next(iter(config.served_model_name), ModelSource.parse(config.model).served_name),
        dtype=dtype,
        device=device,
        vocab_size=int(model_config.vocab_size),
        context_length=context_length,
        longest_context=longest,
        eos_token_ids=_eos_token_ids(directory),
        fingerprint=model_fingerprint(directory, config, dtype, device, fixed_length, scheme, matmul),
        share=Share(0, 1) if group is None else Share(group.rank, group.size),
        attention=attention,
        matmul=matmul,
    )


def _refuse_unshown(family: Family, config: EngineConfig) -> None:
    """Reject settings whose guarantees are only verified for registered families. Raises `ConfigError`."""
    for name, default in (("batch_invariant", False), ("tensor_parallel_size", 1)):
        value = getattr(config, name)
        if family.is_generic and value != default:
            message = f"{name}={value!r} is not supported for model type {family.model_types[0]!r}"
            raise ConfigError(message, setting=name)


def resolve_dtype(
    config: EngineConfig, model_config: Any, device: DeviceBackend, *, is_quantized: bool = False
) -> torch.dtype:
    """Return the model's dtype; `is_quantized`: the checkpoint is."""
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    declared = getattr(model_config, "dtype", None)
    return device.default_dtype(
        declared if isinstance(declared, torch.dtype) else None,
        is_quantized=is_quantized or config.quantization is not None,
    )


def _build_config(family: Family, raw: dict[str, Any], directory: Path) -> Any:
    try:
        model_config: Any = family.build_config(raw)
    except ModelLoadError:
        raise
    except Exception as error:  # the file can make transformers' validation raise anything
        message = " ".join(str(error).split())  # some have several lines
        raise ModelLoadError(f"can't read {directory / 'config.json'}: {message}") from error
    for name in _SIZES:
        size = getattr(model_config, name, None)
        if name == "num_attention_heads" and size is None and recurrent_kinds(model_config):
            continue
        if not isinstance(size, int) or size < 1:
            raise ModelLoadError(f"can't read {directory / 'config.json'}: {name} is {size!r}")
    check_rope(model_config)
    if not hasattr(model_config, "num_attention_heads"):  # all layers are recurrent
        return model_config
    num_heads, num_kv_heads = model_config.num_attention_heads, family.num_kv_heads(model_config)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ModelLoadError(
            f"can't read {directory / 'config.json'}: {num_heads} heads don't share {num_kv_heads} KV heads evenly"
        )
    return model_config


def _skip_padding_checks(module: torch.nn.Module) -> None:
    """Disable a padding warning for which some models read token ids back from the device in each step."""
    for part in module.modules():
        if hasattr(part, "warn_if_padding_and_no_attention_mask"):
            vars(part)["warn_if_padding_and_no_attention_mask"] = lambda *_: None


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    try:
        return tuple(generation_eos_token_ids(directory))
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"can't read eos_token_id in {directory}: {error}") from error


def _load_module(
    config: EngineConfig,
    family: Family,
    model_config: Any,
    dtype: torch.dtype,
    device: DeviceBackend,
    group: RankGroup | None,
) -> Any:
    directory = model_directory(config.model)
    module_class: Any = causal_lm_class(model_config)
    options = {
        "dtype": dtype,
        # A family without the interface, which the generic one may lack, only accepts the name of its own attention.
        "attn_implementation": PAGED_ATTENTION
        if family.has_attention_interface and not family.is_generic
        else "eager",
    }
    is_dummy = config.load_format == "dummy"
    tensors: dict[str, Any] = {} if is_dummy else read_tensors(weight_files(directory), family.text_name)
    scheme = read_scheme(directory)
    plan = None
    if group is not None:
        split, share = _tensor_split(family, model_config), Share(group.rank, group.size)
        num_kv_heads = family.num_kv_heads(model_config)
        plan = ShardingPlan(split, share, model_config.num_attention_heads, num_kv_heads)
    try:
        if is_dummy:
            torch.manual_seed(config.seed)
            with device.device:  # the random weights of a large model take minutes on the CPU
                module = module_class._from_config(model_config, **options)
            tensors = dict(module.state_dict())
        else:
            check_sizes(model_config, tensors)
            if scheme is None:
                check_packing(tensors)
            else:
                tensors = join_parts(tensors, scheme, dtype)
                check_quantized(tensors, scheme)
                # The original modules of a generic family are observed and compared with the serving model.
                if family.convert_tensors is not unchanged or family.is_generic:
                    logger.info("%s: the weights are widened, and then converted", family.name)
                    tensors = widened(tensors)
            tensors = family.convert_tensors(tensors, model_config)
        experts = ExpertTensors({} if family.is_generic else tensors, dtype)
        tensors = tensors if family.is_generic else experts.others
        if plan is not None and group is not None:
            module_class, tensors = sharded_class(module_class, plan, group), plan.cut(tensors)
        if not is_dummy or plan is not None:
            module = fill_module(module_class, model_config, placeholders(tensors), options)
            place(module, tensors, is_split=plan is not None)
            experts.place(module, Share(0, 1) if plan is None else plan.share, group)
    except Exception as error:  # inconsistent sizes and shapes: all of them end startup
        raise ModelLoadError(f"can't load the weights in {directory}: {error}") from error
    # Set only now, for the masks: transformers does not create masks for an unknown implementation.
    module.config._attn_implementation = PAGED_IN_ORDER if family.is_generic else PAGED_ATTENTION
    family.adapt(module)
    if plan is not None and group is not None:
        finish_sharding(module, plan, group)
    return module


def fill_module(
    module_class: Any,
    model_config: Any,
    tensors: dict[str, torch.Tensor],
    options: dict[str, Any],
    *,
    optional: str | None = None,
) -> Any:
    """Build a module and load its tensors.

    Args:
        tensors: all tensors of the checkpoint, by name.
        options: further arguments of `from_pretrained`.
        optional: a part whose tensors may be missing.

    Raises:
        ModelLoadError: a tensor is missing, has another shape or dtype, or does not belong to the module.
        Exception: transformers may raise any error.
    """
    module, report = built_on_the_cpu(module_class).from_pretrained(
        None,
        config=model_config,
        state_dict=tensors,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported, and rejected below with Pagemill's message
        **options,
    )
    module.__class__ = module_class
    check_dtypes(tensors, tensors.keys() - report["unexpected_keys"])
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ModelLoadError(f"{name} has shape {list(found)}, config.json asks for {list(expected)}")
    missing = sorted(
        name for name in report["missing_keys"] if optional is None or optional not in name.split(".")
    )
    if missing:  # transformers fills them with random numbers and a log line
        raise ModelLoadError(f"{len(missing)} tensors are missing, {missing[0]} first")
    surplus = sorted(
        name
        for name in report["unexpected_keys"]
        if _belongs_to(name, module) and not _is_empty_bias(name, tensors[name])
    )
    if surplus:  # ignoring a bias or a layer would compute another function
        raise ModelLoadError(f"{len(surplus)} tensors have no place in the model, {surplus[0]} first")
    if report["unexpected_keys"]:
        logger.warning(
            "%d tensors that are not part of the model are not used", len(report["unexpected_keys"])
        )
    return module


def _is_empty_bias(name: str, tensor: torch.Tensor) -> bool:
    """Return True for the zeros that AutoGPTQ writes for layers without a bias."""
    return name.endswith(".bias") and not bool(tensor.any())


def built_on_the_cpu(module_class: Any) -> Any:
    """Make `from_pretrained` build `module_class` in untouched memory, not on the meta device.

    On the meta device torch infers shapes by importing its compiler, which takes a second at startup.
    """

    class BuiltOnTheCPU(module_class):  # type: ignore[misc]
        @classmethod
        def get_init_context(cls, *args: Any, **options: Any) -> list[Any]:
            contexts = super().get_init_context(*args, **options)
            meta = torch.device("meta")
            return [context for context in contexts if context != meta] + [no_init_weights()]

    BuiltOnTheCPU.__name__, BuiltOnTheCPU.__module__ = module_class.__name__, module_class.__module__
    return BuiltOnTheCPU


def _belongs_to(name: str, module: Any) -> bool:
    """Return True for a tensor inside the language model (not next to it, as for a value head)."""
    first = name.split(".", 1)[0]
    return hasattr(module, first) or hasattr(module.base_model, first)


def _context_length(family: Family, model_config: Any) -> int:
    for name in _CONTEXT_FIELDS:
        value = getattr(model_config, name, None)
        if value == -1 and name not in vars(model_config):
            return _UNBOUNDED_CONTEXT  # in transformers: no limit
        if isinstance(value, int):
            if (length := value - family.first_position(model_config)) < 1:
                raise ModelLoadError(f"config.json: {name} leaves no position for a token: {value}")
            return length
    if recurrent_kinds(model_config):
        return _UNBOUNDED_CONTEXT
    raise ModelLoadError(
        f"model type {model_config.model_type!r} is not supported: its config.json states no context length"
    )


def model_fingerprint(
    directory: Path,
    config: EngineConfig,
    dtype: torch.dtype,
    device: DeviceBackend,
    rotary_length: int,
    stored: Scheme | None = None,
    matmul: Matmul = "own",
) -> str:
    """Identify the function that an engine computes: checkpoints can only be continued if it matches."""
    digest = hashlib.sha256()
    digest.update((directory / "config.json").read_bytes())
    for file in [] if config.load_format == "dummy" else weight_files(directory):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as weights:
            # Both ends and the middle: the complete file would take a second per gigabyte at startup.
            for at in (0, file.stat().st_size // 2, max(0, file.stat().st_size - 2**20)):
                weights.seek(at)
                digest.update(weights.read(2**20))
    scheme = quantization_scheme(config.quantization, device.int8_scale_span)
    settings = (config.load_format, config.seed if config.load_format == "dummy" else 0, scheme,
                config.kv_cache_dtype, device.numbers(dtype), device.device.type, rotary_length)  # fmt: skip
    digest.update(json.dumps(settings).encode())
    if matmul != "own":
        digest.update(matmul.encode())
    if stored is not None:
        digest.update(f"{stored.describe()}, activations: {device.quantized_activations()}".encode())
    return digest.hexdigest()[:16]


def load_outline(config: EngineConfig, device: DeviceBackend) -> LoadedModel:
    """Return the complete model on the meta device, from config.json alone. Raises like `load_model`."""
    directory = model_directory(config.model)
    raw = read_config(directory)
    family = find_family(raw)
    model_config = _build_config(family, raw, directory)
    dtype = resolve_dtype(config, model_config, device, is_quantized=names_scheme(directory))
    context_length = _context_length(family, model_config)
    module_class: Any = causal_lm_class(model_config)
    # The computation of a model without a registered family can only be observed when it runs.
    is_recurrent = bool(recurrent_kinds(model_config))
    attention = None
    if family.is_generic and not is_recurrent:
        attention = _observed_in_small(family, model_config, device)
    try:
        with torch.device("meta"):
            module = module_class._from_config(model_config, dtype=dtype)
    except Exception as error:  # inconsistent sizes: transformers' code may raise anything
        raise ModelLoadError(f"can't build {directory / 'config.json'}: {error}") from error
    if is_recurrent:
        family.adapt(module)
        attention = _observed_without_memory(module)
    return LoadedModel(
        module=module,
        family=family,
        directory=directory,
        served_name=ModelSource.parse(config.model).served_name,
        dtype=dtype,
        device=device,
        vocab_size=model_config.vocab_size,
        context_length=context_length,
        longest_context=None
        if family.extrapolates(model_config)
        else stretched_context(model_config, context_length),
        eos_token_ids=(),
        fingerprint="",
        share=Share(0, 1),
        attention=attention,
    )


def _observed_without_memory(module: Any) -> AttentionShape:
    """Return the attention and state of a model on the meta device, with the number of layers per kind."""
    for part in module.modules():
        stacked = any(parameter.ndim == 3 for parameter in part.parameters(recurse=False))
        if stacked and not isinstance(part, torch.nn.Conv1d) and not hasattr(part, "recurrent_states"):
            # Routing of tokens to experts depends on values, which do not exist here.
            part.forward = lambda states, *_, **__: torch.zeros_like(states)
    seen = attention_shape(module, caches_latents=False)
    return replace(seen, windows=(None,) * len(seen.windows))


def _observed_in_small(family: Family, model_config: Any, device: DeviceBackend) -> AttentionShape:
    """Return the attention of such a model, observed in one narrow layer of random weights."""
    small = copy.deepcopy(model_config)
    for name, size in _SMALL.items():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, size)
    small.pad_token_id = 0
    if small.num_hidden_layers < 1:  # a layer that attends twice counts as two
        small.num_hidden_layers = 2
    module_class: Any = causal_lm_class(small)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    module = module_class._from_config(small, **options)
    family.adapt(module)
    seen = attention_shape(module, caches_latents=device.caches_latents)
    # Only the first of several kinds of layers was observed: assume that none has a window.
    is_mixed = len(set(getattr(model_config, "layer_types", None) or ())) > 1
    windows = (None,) * len(seen.windows) if is_mixed else seen.windows
    return replace(seen, windows=windows * (model_config.num_hidden_layers // small.num_hidden_layers))
