"""The families of models for vectors or scores: their positions, and the source of their labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.packed_attention import PackedScoring, attend_packed

LabelHead = Callable[[Any, torch.Tensor], torch.Tensor]
"""Maps a classifier's module and each text's chosen vector [num_texts, hidden_size] to logits."""


def _nothing(_module: Any) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFamily:
    model_types: tuple[str, ...]
    label_head: LabelHead
    takes_types: bool = False
    """True if tokens of a pair's second text have a separate type."""
    padding_offset: bool = False
    """True if positions are counted from the padding id, as in fairseq; a padding token's position is its id."""
    is_causal: bool = False
    """True for a decoder, whose label is read from a text's last token."""
    adapt: Callable[[Any], None] = _nothing
    """Rewires the loaded base model, in place."""


def _bert_labels(module: Any, first: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = module.classifier(module.bert.pooler(first[:, None]))
    return logits


def _head_labels(module: Any, first: torch.Tensor) -> torch.Tensor:
    """A head that selects the first token itself."""
    logits: torch.Tensor = module.classifier(first[:, None])
    return logits


def _distilbert_labels(module: Any, first: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = module.classifier(torch.relu(module.pre_classifier(first)))
    return logits


def _modernbert_labels(module: Any, pooled: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = module.classifier(module.head(pooled))
    return logits


def _decoder_labels(module: Any, last: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = module.score(last)
    return logits


def _adapt_mpnet(model: Any) -> None:
    """Replace MPNet's custom attention, whose bias only depends on the distance of two tokens."""
    encoder = model.encoder
    longest = int(model.config.max_position_embeddings)
    with torch.inference_mode():
        whole = encoder.compute_position_bias(
            torch.empty(1, longest, 0, device=encoder.relative_attention_bias.weight.device)
        )[0]
    encoder.compute_position_bias = lambda *_, **__: None

    def bias(length: int) -> torch.Tensor:
        part: torch.Tensor = whole[:, :length, :length]
        return part

    def forward(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor]:
        rows = hidden_states[0]
        heads = (len(rows), self.num_attention_heads, self.attention_head_size)
        scoring = PackedScoring(self.attention_head_size**-0.5, bias=bias)
        query, key, value = (part(rows).view(heads) for part in (self.q, self.k, self.v))
        out = attend_packed(query, key, value, scoring)
        return (self.o(out.flatten(1))[None],)

    for layer in encoder.layer:
        layer.attention.attn.forward = MethodType(forward, layer.attention.attn)


FAMILIES = (
    PoolingFamily(model_types=("bert",), label_head=_bert_labels, takes_types=True),
    PoolingFamily(model_types=("electra",), label_head=_head_labels, takes_types=True),
    PoolingFamily(
        model_types=("roberta", "camembert", "xlm-roberta"),
        label_head=_head_labels,
        takes_types=True,
        padding_offset=True,
    ),
    PoolingFamily(model_types=("mpnet",), label_head=_head_labels, padding_offset=True, adapt=_adapt_mpnet),
    PoolingFamily(model_types=("distilbert",), label_head=_distilbert_labels),
    PoolingFamily(model_types=("modernbert",), label_head=_modernbert_labels),
    PoolingFamily(
        model_types=("llama", "mistral", "qwen2", "qwen3"), label_head=_decoder_labels, is_causal=True
    ),
)
SUPPORTED_TYPES = tuple(sorted(kind for family in FAMILIES for kind in family.model_types))


def find_pooling_family(model_type: Any) -> PoolingFamily:
    """Return the family of this `model_type`. Raises `ModelLoadError` with the supported ones."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    raise ModelLoadError(
        f"model type {str(model_type)[:100]!r} gives no vectors or scores here; "
        f"supported: {', '.join(SUPPORTED_TYPES)}"
    )
