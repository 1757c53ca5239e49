"""SentencePiece models (`tokenizer.model`) as Hugging Face tokenizers with SentencePiece's ids."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from pagemill.engine.errors import ModelLoadError

_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType


class PieceType(IntEnum):
    """`ModelProto.SentencePiece.Type`; GGUF's `tokenizer.ggml.token_type` is the same."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceModel:
    pieces: list[str]
    """By id."""
    scores: list[float]
    types: list[int]
    algorithm: Literal["bpe", "unigram"]
    adds_prefix: bool
    """A text starts as if after a space."""
    collapses_spaces: bool = False
    charsmap: bytes = b""
    """Compiled rules of normalization; empty: none."""

    def token_of(self, kind: PieceType) -> str | None:
        """Return the first piece of a type."""
        return next((p for p, t in zip(self.pieces, self.types, strict=True) if t == kind), None)


def read_sentencepiece(file: Path) -> SentencePieceModel:
    """Read a model. Raises `ModelLoadError` if it is damaged or of an unsupported kind."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as schema

    model: Any = schema.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except (OSError, DecodeError) as error:
        raise ModelLoadError(f"can't load the tokenizer in {file}: {error}; download it again") from error
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    is_known = trainer.model_type in (_UNIGRAM, _BPE) and normalizer.escape_whitespaces
    if not model.pieces or not is_known or trainer.treat_whitespace_as_suffix:
        raise ModelLoadError(
            f"can't load the tokenizer in {file}: not a SentencePiece model of kind BPE or unigram; convert it to a "
            "tokenizer.json, or serve token ids (skip_tokenizer_init)"
        )
    return SentencePieceModel(
        pieces=[piece.piece for piece in model.pieces],
        scores=[piece.score for piece in model.pieces],
        types=[piece.type for piece in model.pieces],
        algorithm="bpe" if trainer.model_type == _BPE else "unigram",
        adds_prefix=normalizer.add_dummy_prefix,
        collapses_spaces=normalizer.remove_extra_whitespaces,
        charsmap=normalizer.precompiled_charsmap,
    )


def build_tokenizer(model: SentencePieceModel, *, prefixes_every_part: bool) -> Tokenizer:
    """Return the tokenizer; control and user-defined pieces are separate tokens anywhere in a text.

    Args:
        prefixes_every_part: text after such a token also starts as if after a space, as in tokenizers that call
            SentencePiece for each part (`legacy` in transformers).
    """
    tokenizer = Tokenizer(_bpe(model) if model.algorithm == "bpe" else _unigram(model))
    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.collapses_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.adds_prefix and prefixes_every_part:
        steps.append(normalizers.Prepend(_SPACE))
    if prefixes_every_part or not model.adds_prefix:
        steps.append(normalizers.Replace(" ", _SPACE))
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    ends = [decoders.Strip(" ", 1, 0)] if model.adds_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    tokenizer.add_tokens(
        [
            AddedToken(piece, normalized=False, special=kind != PieceType.USER_DEFINED)
            for piece, kind in zip(model.pieces, model.types, strict=True)
            if kind in (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED)
        ]
    )
    return tokenizer


def _bpe(model: SentencePieceModel) -> BPE:
    """Return the merges that the scores represent: all ways to join two pieces, best score first."""
    vocab = {piece: number for number, piece in enumerate(model.pieces)}
    mergeable = {p for p, kind in zip(model.pieces, model.types, strict=True) if kind == PieceType.NORMAL}
    merges = [
        (-model.scores[vocab[piece]], len(piece[:cut]), piece[:cut], piece[cut:])
        for piece in mergeable
        for cut in range(1, len(piece))
        if piece[:cut] in mergeable and piece[cut:] in mergeable
    ]
    merges.sort()
    return BPE(
        vocab=vocab,
        merges=[(left, right) for *_, left, right in merges],
        unk_token=model.token_of(PieceType.UNKNOWN),
        fuse_unk=True,
        byte_fallback=PieceType.BYTE in model.types,
    )


def _unigram(model: SentencePieceModel) -> Unigram:
    scored = list(zip(model.pieces, model.scores, strict=True))
    unknown = model.types.index(PieceType.UNKNOWN)
    return Unigram(scored, unk_id=unknown, byte_fallback=PieceType.BYTE in model.types)
