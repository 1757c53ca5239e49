"""The kinds of models that can't be run, and what to use in their place."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pagemill.engine.layers.library import tasks_of


@dataclass(frozen=True, slots=True)
class RefusalKind:
    name: str
    reasons: re.Pattern[str]
    """Matches the beginning of a reason."""
    advice: str


def _kind(name: str, reasons: str, advice: str) -> RefusalKind:
    return RefusalKind(name, re.compile(reasons), advice)


ENCODER_DECODER = "it is an encoder-decoder"
MORE_THAN_TEXT = "it reads more than text"
NO_TEXT = "transformers has no text generator of this type"
KINDS = (
    _kind(
        "recurrent state",
        r"the recurrent layers |\d+ of \d+ layers keep a state",
        "only states that are in transformers' own cache are served; docs/models.md lists the types that are exact",
    ),
    _kind(
        "recurrent state, or several models in one",
        "its configuration has no attention heads",
        "only decoders that keep keys and values are run; use a model all of whose layers attend",
    ),
    _kind(
        "attention to some keys",
        "it has layers of type",
        "such layers read chosen or compressed keys, and paged attention reads all of them or a window; use a model "
        "with full or sliding-window attention",
    ),
    _kind(
        "images, audio or video",
        MORE_THAN_TEXT,
        "Pagemill reads text alone; use the text model of its family",
    ),
    _kind(
        "encoder-decoder",
        ENCODER_DECODER,
        "only decoders are run; use a model of that size that is a decoder alone",
    ),
    _kind(
        "no text generator",
        NO_TEXT,
        "models for vectors, labels and scores are listed in docs/embeddings.md, those for text in docs/models.md",
    ),
    _kind(
        "custom attention",
        r"the attention |\d+ heads don't share ",
        "paged attention would compute something else; docs/models.md lists the types that are exact",
    ),
    _kind(
        "custom positions or batches",
        "its positions |the forward pass |the model's own forward pass |the logits differ |its config.json states ",
        "its code can't be served in batches; docs/models.md lists the types that are exact",
    ),
)
_READS_MORE = re.compile("IMAGE_TEXT_TO_TEXT|MULTIMODAL_LM|SPEECH_SEQ_2_SEQ|VISUAL_QUESTION|RNNT|TDT|CTC")
"""In the names of transformers' mappings of models that write text."""


def kind_of(reason: str) -> RefusalKind | None:
    """Return the kind of a refusal by its reason."""
    return next((kind for kind in KINDS if kind.reasons.match(reason)), None)


def with_advice(reason: str) -> str:
    """Return the reason, and what to do."""
    kind = kind_of(reason)
    return reason if kind is None else f"{reason}; {kind.advice}"


def decoder_refusal(model_type: str) -> str | None:
    """Return why a type of transformers that is not a causal language model is rejected; None: an unknown type."""
    if not (tasks := tasks_of(model_type)):
        return None
    if any(map(_READS_MORE.search, tasks)):
        return MORE_THAN_TEXT
    if any("SEQ_TO_SEQ_CAUSAL_LM" in task for task in tasks):
        return ENCODER_DECODER
    return NO_TEXT
