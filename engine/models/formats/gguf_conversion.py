"""A GGUF file to a Hugging Face directory; runs in the converting process alone.

transformers knows the names, the layouts and the tokenizers; gguf knows the numbers. Tensors are converted one by
one, so that memory is needed for a shard and not for the model.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import modeling_gguf_pytorch_utils as names
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.families.registry import find_family
from pagemill.engine.models.formats.gguf_tokenizer import (
    add_bos,
    check_tokenizer_field,
    correct_tokenizer,
    end_token_ids,
    sentencepiece_of,
)
from pagemill.engine.models.formats.shards import ShardWriter
from pagemill.engine.text.tokenizer_files import save_sentencepiece

# Frequencies that follow from the configuration, or are refused below.
_ROPE_FACTORS = "rope_freqs.weight"


def convert_gguf(files: list[Path], directory: Path) -> None:
    """Write config.json, the tokenizer and the dequantised tensors of one file into `directory`.

    Raises:
        ModelLoadError: an unsupported architecture or tensor type, or tensors that are not the architecture's.
    """
    (file,) = files
    gguf.GGUFReader = cache(gguf.GGUFReader)  # transformers reads the file three times, seconds each
    reader = _read(file)
    architecture = _text(reader, "general.architecture")
    if architecture not in names.GGUF_SUPPORTED_ARCHITECTURES:
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
    check_fields(reader, architecture, config, file.name)
    config.dtype = torch.float32
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    find_family(config.to_dict())
    _write_tensors(reader, architecture, model, directory)
    config.save_pretrained(directory)
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


def _read(file: Path) -> Any:
    try:
        return gguf.GGUFReader(str(file))
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can make it raise anything
        message = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ModelLoadError(f"{file.name} is damaged ({message}); download it again") from error


def _text(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())


def check_fields(reader: Any, architecture: str, config: Any, name: str) -> None:
    """Check that each field of the architecture and the tokenizer is used or has no effect. Raises ModelLoadError."""
    mapped = GGUF_CONFIG_MAPPING.get(architecture, {})
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
        if prefix != architecture or mapped.get(rest) is not None:
            continue
        value = reader.get_field(key).contents()
        if value not in neutral.get(rest, ()):
            raise ModelLoadError(
                f"{name}: {key} = {str(value)[:60]} is not supported; give the original checkpoint"
            )


def _check_types(reader: Any, file: Path) -> None:
    """Dequantise a block of each type. Raises `ModelLoadError` for those that gguf can't read."""
    for kind, name in {tensor.tensor_type: tensor.name for tensor in reader.tensors}.items():
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{file.name}: {name} has type {kind.name}, which is not supported; give a file of another quantisation"
            ) from error


def _write_tensors(reader: Any, architecture: str, model: Any, directory: Path) -> None:
    processor = names.TENSOR_PROCESSORS.get(architecture, names.TensorProcessor)(
        config=model.config.to_dict()
    )
    mapping = names.get_gguf_hf_weights_map(model, processor)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    parsed: dict[str, Any] = {"tensors": {}}
    writer = ShardWriter(directory)

    def write(name: str, tensor: torch.Tensor) -> None:
        if expected.get(name) != tuple(tensor.shape):
            raise ModelLoadError(
                f"{name} has shape {list(tensor.shape)}, its header asks for {expected.get(name)}"
            )
        writer.add(name, tensor)

    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            apply_rope_factors(model.config, torch.from_numpy(tensor.data.copy()))
            continue
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        result = processor.process(
            weights=weights, name=tensor.name, tensor_key_mapping=mapping, parsed_parameters=parsed
        )
        if result.name is None:  # the processor has put it, or a part of it, there
            continue
        if result.name not in mapping:  # transformers leaves it out, which would be another model
            raise ModelLoadError(f"{tensor.name} has no place in a {model.config.model_type} model")
        write(mapping[result.name], torch.from_numpy(result.weights.copy()))
    for name, whole in parsed["tensors"].items():
        write(name, whole)
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    missing = sorted(name for name in expected if name not in writer and name not in tied)
    if missing:
        raise ModelLoadError(f"{len(missing)} tensors are missing, {missing[0]} first; download it again")
    writer.close()


def apply_rope_factors(config: Any, factors: torch.Tensor) -> None:
    """Find the `llama3` scaling that these divisors of the rotary frequencies [head_dim / 2] stand for.

    llama.cpp computes them from config.json when it writes a file, with 1, 4 and 8192 as all Llama 3 have; which
    leaves one unknown, the factor, which is the largest of them. Raises `ModelLoadError` for any others.
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
