"""A Hugging Face directory for a GGUF file, created only in the converting process.

transformers provides names, layouts and tokenizers; gguf provides values. Matrices remain in the file if the
model uses them unchanged or with reordered rows; the other tensors are dequantized one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import modeling_gguf_pytorch_utils as names
from transformers.initialization import no_init_weights
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.families.registry import find_family
from pagemill.engine.models.formats.gguf_tensors import Contents, Entry
from pagemill.engine.models.formats.gguf_tokenizer import (
    add_bos,
    check_tokenizer_field,
    correct_tokenizer,
    end_token_ids,
    sentencepiece_of,
)
from pagemill.engine.models.formats.shards import ShardWriter
from pagemill.engine.text.tokenizer_files import save_sentencepiece

# Frequencies that follow from the configuration, or are rejected below.
_ROPE_FACTORS = "rope_freqs.weight"
_EXPERTS = re.compile(r"(?P<name>.*\.ffn_(?P<part>gate|up|down)_exps)\.weight")
_MAPPED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""Architectures with other names in transformers."""
_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Fields that transformers does not read."""
_STACKING = ("Qwen2MoeTensorProcessor",)
"""Architectures with gate and up projections of experts in one tensor, the gates' rows first."""


def convert_gguf(files: list[Path], directory: Path) -> None:
    """Write config.json, the tokenizer and the tensors that must be changed of one file into `directory`.

    Raises:
        ModelLoadError: an unsupported architecture or tensor type, or tensors that are not the architecture's.
    """
    (file,) = files
    # transformers reads the file three times, and requests the names of every module, seconds each.
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(_Reader), cache(gguf.get_tensor_name_map)
    reader = _read(file)
    architecture = _text(reader, "general.architecture")
    if _MAPPED.get(architecture, architecture) not in names.GGUF_SUPPORTED_ARCHITECTURES:
        raise ModelLoadError(
            f"{file.name}: GGUF files of architecture {architecture!r} are not supported; give the original checkpoint"
        )
    if (parts := reader.get_field("split.count")) is not None and int(parts.contents()) > 1:
        number = reader.get_field("split.no")
        part = 1 if number is None else int(number.contents()) + 1
        raise ModelLoadError(
            f"{file.name} is part {part} of {int(parts.contents())} of a split file, which is not supported; join the "
            "parts with llama-gguf-split --merge"
        )
    _check_types(reader, file)
    layers = reader.get_field(f"{architecture}.block_count")
    if layers is not None and int(layers.contents()) > len(reader.tensors):
        raise ModelLoadError(
            f"{file.name} is damaged: it names more layers than it has tensors; download it again"
        )
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    for rest, name in _SIZES.items():
        if (field := reader.get_field(f"{architecture}.{rest}")) is not None:
            setattr(config, name, int(field.contents()))
    check_fields(reader, architecture, config, file.name)
    config.dtype = torch.float32
    with _without_parameters(), no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    find_family(config.to_dict())
    contents = _write_tensors(reader, architecture, model, directory)
    config.save_pretrained(directory)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": contents.json()}))
    generation = GenerationConfig.from_model_config(config)
    if ends := end_token_ids(reader):
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    generation.save_pretrained(directory)
    if _text(reader, "tokenizer.ggml.model") == "llama":
        save_sentencepiece(*sentencepiece_of(reader), directory)
    else:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        correct_tokenizer(tokenizer, reader)
        add_bos(tokenizer, reader)
        tokenizer.save_pretrained(directory)


@contextmanager
def _without_parameters() -> Iterator[None]:
    """Build modules whose parameters have no memory.

    Unlike the meta device as a whole, on which functions such as `torch.arange` import torch's compiler.
    """
    register = torch.nn.Module.register_parameter

    def register_outline(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    setattr(torch.nn.Module, "register_parameter", register_outline)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.nn.Module, "register_parameter", register)  # noqa: B010


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The package's reader, with a plain array in place of the mapped one, of which it creates millions of slices."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped)


def _read(file: Path) -> Any:
    try:
        return gguf.GGUFReader(str(file))
    except MemoryError:
        raise
    except Exception as error:  # it can raise any error for a damaged file
        message = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ModelLoadError(f"{file.name} is damaged ({message}); download it again") from error


def _text(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())


def check_fields(reader: Any, architecture: str, config: Any, name: str) -> None:
    """Check that each field of the architecture and the tokenizer is used or has no effect. Raises ModelLoadError."""
    mapped = GGUF_CONFIG_MAPPING.get(_MAPPED.get(architecture, architecture), {})
    heads = getattr(config, "num_attention_heads", 0) or 1
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    rope = getattr(config, "rope_parameters", None) or {}
    rotary = int(head_dim * (rope.get("partial_rotary_factor") or 1))
    neutral: dict[str, tuple[Any, ...]] = {
        "rope.dimension_count": (rotary,),
        "attention.key_length": (head_dim,),
        "attention.value_length": (head_dim,),
        "attention.causal": (True,),
        "attention.sliding_window": (getattr(config, "sliding_window", None),),
        "attn_logit_softcapping": (getattr(config, "attn_logit_softcapping", None),),
        "final_logit_softcapping": (getattr(config, "final_logit_softcapping", None),),
        "rope.scaling.type": ("none",),
        "rope.scaling.factor": (1.0,),
        "rope.scale_linear": (1.0,),
        "rope.scaling.attn_factor": (1.0,),
        "rope.scaling.original_context_length": (getattr(config, "max_position_embeddings", None),),
        "rope.scaling.finetuned": (True, False),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "tensor_data_layout": ("Meta AI original pth",),
    }
    for key in reader.fields:
        prefix, _, rest = key.partition(".")
        if prefix == "tokenizer":
            check_tokenizer_field(key, reader, name)
        if prefix != architecture or mapped.get(rest) is not None or rest in _SIZES:
            continue
        value = reader.get_field(key).contents()
        if value not in neutral.get(rest, ()):
            raise ModelLoadError(
                f"{name}: {key} = {str(value)[:60]} is not supported; give the original checkpoint"
            )


def _check_types(reader: Any, file: Path) -> None:
    """Dequantize a block of each type. Raises `ModelLoadError` for those that gguf can't read."""
    for kind, name in {tensor.tensor_type: tensor.name for tensor in reader.tensors}.items():
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{file.name}: {name} has type {kind.name}, which is not supported; give a file of another quantization"
            ) from error


def _write_tensors(reader: Any, architecture: str, model: Any, directory: Path) -> Contents:
    """Write the tensors that must be changed. Return the locations of the others in the file."""
    processor = names.TENSOR_PROCESSORS.get(architecture, names.TensorProcessor)(
        config=model.config.to_dict()
    )
    mapping = names.get_gguf_hf_weights_map(model, processor)
    shapes = _Shapes({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    parsed: dict[str, Any] = {"tensors": {}}
    writer, stored = ShardWriter(directory), _Stored()

    def write(name: str, tensor: torch.Tensor) -> None:
        shapes.check(name, tuple(tensor.shape))
        writer.add(name, tensor)

    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            apply_rope_factors(model.config, torch.from_numpy(tensor.data.copy()))
            continue
        if stored.add(tensor, processor, mapping, shapes):
            continue
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        result = processor.process(
            weights=weights, name=tensor.name, tensor_key_mapping=mapping, parsed_parameters=parsed
        )
        if result.name is None:  # the processor has stored it, or a part of it
            continue
        if result.name not in mapping:  # transformers omits it, which would be another model
            raise ModelLoadError(f"{tensor.name} has no place in a {model.config.model_type} model")
        write(mapping[result.name], torch.from_numpy(result.weights.copy()))
    for name, whole in parsed["tensors"].items():
        write(name, whole)
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    missing = sorted(shapes.unseen - tied)
    if missing:
        raise ModelLoadError(f"{len(missing)} tensors are missing, {missing[0]} first; download it again")
    writer.close()
    return Contents(stored.entries, tuple(stored.orders))


class _Shapes:
    """The shapes of a model's tensors, and those already seen."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self.unseen = set(shapes)

    def check(self, name: str, found: tuple[int, ...]) -> None:
        if (expected := self._shapes.get(name)) != found:
            raise ModelLoadError(f"{name} has shape {list(found)}, its header asks for {expected}")
        self.unseen.discard(name)

    def check_experts(self, name: str, part: str, found: tuple[int, ...]) -> None:
        """Check the gate, up or down projections [experts, rows, columns] of a model that stacks and merges them."""
        count, rows, columns = found
        self.check(name, (count, rows if part == "down" else 2 * rows, columns))


class _Stored:
    """The matrices that remain in the file."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.orders: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    def add(self, tensor: Any, processor: Any, mapping: dict[str, str], shapes: _Shapes) -> bool:
        """Return False for a tensor that must be changed, and for one that the model does not have."""
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if (experts := _EXPERTS.fullmatch(tensor.name)) is not None:
            name = mapping.get(experts["name"])
            if name is None or len(shape) != 3 or type(processor).__name__ not in _STACKING:
                return False
            shapes.check_experts(name, experts["part"], shape)
            self._enter(
                f"{name.rpartition('.')[0]}.*.{experts['part']}_proj.weight",
                tensor,
                *shape[1:],
                experts=shape[0],
            )
            return True
        name = mapping.get(tensor.name)
        if len(shape) != 2 or name is None or not name.endswith(".weight"):
            return False
        order = _order_of_rows(tensor.name, shape, processor)
        if order is None:
            return False
        shapes.check(name, shape)
        number = None
        if order != tuple(range(shape[0])):
            number = self._numbers.setdefault(order, len(self.orders))
            self.orders += [order] if number == len(self.orders) else []
        self._enter(name, tensor, *shape, order=number)
        return True

    def _enter(
        self, name: str, tensor: Any, rows: int, columns: int, experts: int = 0, order: int | None = None
    ) -> None:
        kind, offset = tensor.tensor_type.name, int(tensor.data_offset)
        row_bytes = int(tensor.n_bytes) // (rows * max(1, experts))
        self.entries[name] = Entry(kind, offset, rows, columns, row_bytes, experts, order)


def _order_of_rows(name: str, shape: tuple[int, int], processor: Any) -> tuple[int, ...] | None:
    """Return the order that makes a matrix's rows the model's; None if the processor changes it otherwise."""
    numbers = np.broadcast_to(np.arange(shape[0], dtype=np.float32)[:, None], shape)
    try:
        result = processor.process(
            weights=numbers, name=name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
        )
    except (ValueError, TypeError, KeyError):  # it needs all weights
        return None
    if result.weights is numbers and result.name == name:
        return tuple(range(shape[0]))
    if (
        result.name != name
        or result.weights.shape != shape
        or not (result.weights == result.weights[:, :1]).all()
    ):
        return None
    order = tuple(int(row) for row in result.weights[:, 0])
    return order if sorted(order) == list(range(shape[0])) else None


def apply_rope_factors(config: Any, factors: torch.Tensor) -> None:
    """Find the `llama3` scaling that these divisors of the rotary frequencies [head_dim / 2] represent.

    llama.cpp computes them from config.json when it writes a file, with 1, 4 and 8192 as in every Llama 3. The only
    unknown is the factor, which is the largest divisor. Raises `ModelLoadError` for any others.
    """
    if torch.all(factors == 1):
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = dict(config.rope_parameters)
    scaled = {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    head_dim = 2 * len(factors)
    base = 1.0 / plain["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    config.rope_parameters = plain | scaled
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if not torch.allclose(base / frequencies, factors, rtol=1e-4):
        raise ModelLoadError(
            f"{_ROPE_FACTORS} is not llama3 scaling, the only supported kind; use the original checkpoint"
        )
