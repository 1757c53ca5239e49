"""Tiny random models for vectors or scores, saved as their own libraries save them, and helpers to run them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from pagemill.engine.config import EngineConfig
from pagemill.engine.pooling.engine import PoolingEngine
from pagemill.engine.pooling.input_processor import PoolInput
from pagemill.engine.serving import load_engine

WORDS = [f"w{number}" for number in range(50)] + ["query:", "passage:", "Represent"]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
SIZES = {
    "vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODERS: dict[str, Any] = {
    "bert": BertConfig(**SIZES, max_position_embeddings=64),
    "roberta": RobertaConfig(**SIZES, max_position_embeddings=65, type_vocab_size=2),
    "xlm-roberta": XLMRobertaConfig(**SIZES, max_position_embeddings=65),
    "electra": ElectraConfig(**SIZES, embedding_size=16, max_position_embeddings=64),
    "mpnet": MPNetConfig(**SIZES, max_position_embeddings=66),
    "distilbert": DistilBertConfig(
        vocab_size=SIZES["vocab_size"],
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
    ),
    "modernbert": ModernBertConfig(
        **SIZES | {"num_hidden_layers": 4},
        local_attention=8,
        max_position_embeddings=64,
        cls_token_id=1,
        sep_token_id=2,
    ),
}
_DECODER = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64}
DECODERS: dict[str, Any] = {
    "llama": LlamaConfig(**_DECODER),
    "mistral": MistralConfig(**_DECODER, sliding_window=6),
    "qwen2": Qwen2Config(**_DECODER),
    "qwen3": Qwen3Config(**_DECODER, head_dim=8),
}


def save_tokenizer(directory: Path, model_type: str, *, longest: int = 60) -> None:
    """A token per word; encoders enclose texts in special tokens, decoders end them with one."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("<s>", 1), ("</s>", 2)]
    is_decoder = model_type in DECODERS
    types = ["token_type_ids"] if model_type in ("bert", "electra") else []
    single, pair = ("$A </s>", "$A $B </s>") if is_decoder else ("<s> $A </s>", "<s> $A </s> $B:1 </s>:1")
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=longest,
        model_input_names=["input_ids", *types, "attention_mask"],
    ).save_pretrained(directory)


def save_base(directory: Path, config: Any, model_class: Any) -> Any:
    """Save a random model with wide weights, so that every text has a different vector."""
    torch.manual_seed(1)
    model = model_class.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower():
                parameter.normal_(std=0.2 if parameter.ndim > 1 else 0.1)
    model.save_pretrained(directory)
    save_tokenizer(directory, config.model_type)
    return model.eval()


def texts_of_all_lengths(count: int = 40, longest: int = 40) -> list[str]:
    draw = random.Random(3)
    lengths = [1, longest, *(draw.randrange(1, longest + 1) for _ in range(count - 2))]
    return [" ".join(draw.choices(WORDS[:50], k=length)) for length in lengths]


def engine_of(directory: Path, **settings: Any) -> PoolingEngine:
    options: dict[str, Any] = {"num_threads": 1, "device": "cpu", "dtype": "float32"}
    engine = load_engine(EngineConfig(model=str(directory), **(options | settings)))
    assert isinstance(engine, PoolingEngine)
    return engine


def run(engine: PoolingEngine, kind: Any, texts: Sequence[Any], **fields: Any) -> np.ndarray[Any, Any]:
    """Return a request's rows; raises AssertionError if it fails."""
    token_ids, params, task = engine.input_processor.process_pool(PoolInput(kind=kind, texts=texts, **fields))
    engine.add_request("one", token_ids, params, task=task)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert outputs[-1].error is None, outputs[-1].error
    pooled = outputs[-1].pooled
    assert pooled is not None
    return np.frombuffer(pooled.data, "<f4").reshape(-1, pooled.width)


def closest(found: np.ndarray[Any, Any], wanted: Any) -> float:
    """Return the lowest cosine between rows that should be equal."""
    wanted = np.asarray(wanted, np.float64).reshape(found.shape)
    product = (found.astype(np.float64) * wanted).sum(1)
    return float((product / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)).min())
