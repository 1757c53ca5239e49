"""Reads a model directory's tokenizer, from files of any kind. Code shipped with a model is never run.

Vocabularies of known kinds are converted; transformers reads the rest.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill.engine.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pagemill.engine.text.sentencepiece_model import SentencePieceModel

logger = logging.getLogger(__name__)

_NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "qwen.tiktoken")
# Classes with SentencePiece's ids whose code only adds BOS and EOS. None: no class is specified.
_SENTENCEPIECE = {None, "LlamaTokenizer", "LlamaTokenizerFast", "BaichuanTokenizer", "BaiChuanTokenizer",
                  "InternLMTokenizer", "InternLM2Tokenizer", "InternLM2TokenizerFast",
                  "InternLM3Tokenizer"}  # fmt: skip
_LLAMA_LIKE = ("llama", "mistral", "baichuan", "internlm", "internlm2", "internlm3", "aquila")
_TIKTOKEN = "QWenTokenizer"
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
_OWN_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
              "chat_template.json")  # fmt: skip


def has_tokenizer(directory: Path) -> bool:
    """Return True if there are files of a tokenizer, readable or not."""
    return any((directory / name).exists() for name in _NAMES)


def import_libraries() -> None:
    """Import the modules of `read_tokenizer`, which takes a second, while another thread loads a model."""
    from transformers import AutoTokenizer

    del AutoTokenizer


def read_tokenizer(directory: Path) -> Any:
    """Return transformers' tokenizer.

    Raises:
        ModelLoadError: it uses custom code, or a file is missing.
        Exception: a broken file can make transformers raise anything.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config = _read_json(directory / "tokenizer_config.json")
    kind = config.get("tokenizer_class")
    is_code = "auto_map" in config
    if (directory / "tokenizer.json").is_file():
        # transformers replaces a file's rules by those of the model type's class.
        if kind in _GENERIC or is_code or "auto_map" in _read_json(directory / "config.json"):
            return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if (directory / "qwen.tiktoken").is_file() and kind in (_TIKTOKEN, None):
        return _from_tiktoken(directory, config)
    if (
        (directory / "tokenizer.model").is_file()
        and kind in _SENTENCEPIECE
        and _is_llama_like(directory, kind)
    ):
        return _from_sentencepiece(directory, config)
    if is_code:
        raise ModelLoadError(
            f"can't load the tokenizer in {directory}: {kind or 'it'} is code of the publisher's, which is never run; "
            "convert it to a tokenizer.json, or serve token ids (skip_tokenizer_init)"
        )
    _check_whole(directory)
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def save_sentencepiece(model: SentencePieceModel, config: dict[str, Any], directory: Path) -> None:
    """Write a SentencePiece model to a directory as tokenizer.json, with a matching tokenizer_config.json.

    Args:
        config: of tokenizer_config.json: special tokens, `add_bos_token` (True), `add_eos_token`, `legacy` (True).
    """
    from pagemill.engine.text.sentencepiece_model import PieceType, build_tokenizer

    legacy = config.get("legacy")
    tokenizer = build_tokenizer(model, prefixes_every_part=legacy is None or bool(legacy))
    control = [p for p, kind in zip(model.pieces, model.types, strict=True) if kind == PieceType.CONTROL]
    defaults = {
        "bos_token": "<s>" if "<s>" in control else None,
        "eos_token": "</s>" if "</s>" in control else None,
        "unk_token": model.token_of(PieceType.UNKNOWN),
        "add_bos_token": True,
        "add_eos_token": False,
    }
    config = {name: value for name, value in defaults.items() if value is not None} | config
    _save(tokenizer, directory, config)


def _from_sentencepiece(directory: Path, config: dict[str, Any]) -> Any:
    from pagemill.engine.text.sentencepiece_model import read_sentencepiece

    logger.info("converting tokenizer.model, a few seconds")
    model = read_sentencepiece(directory / "tokenizer.model")
    with tempfile.TemporaryDirectory() as scratch:
        _copy_own_files(directory, Path(scratch))
        save_sentencepiece(model, config, Path(scratch))
        return _load(Path(scratch))


def _from_tiktoken(directory: Path, config: dict[str, Any]) -> Any:
    from pagemill.engine.text.tiktoken_vocabulary import QWEN_END, qwen_tokenizer

    file = directory / "qwen.tiktoken"
    logger.info("converting %s, a few seconds", file.name)
    with tempfile.TemporaryDirectory() as scratch:
        _copy_own_files(directory, Path(scratch))
        _save(qwen_tokenizer(file), Path(scratch), {"eos_token": QWEN_END} | config)
        return _load(Path(scratch))


def _copy_own_files(directory: Path, scratch: Path) -> None:
    for name in _OWN_FILES:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, scratch / name)


def _save(tokenizer: Tokenizer, directory: Path, config: dict[str, Any]) -> None:
    """Write the files that `PreTrainedTokenizerFast` reads. BOS and EOS are added by the tokenizer.json itself."""
    from tokenizers.processors import TemplateProcessing

    bos, eos = (
        _content(config.get(f"{end}_token")) if config.get(f"add_{end}_token") else None
        for end in ("bos", "eos")
    )
    ends = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]
    if ends and all(number is not None for _, number in ends):
        single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ends)
    tokenizer.save(str(directory / "tokenizer.json"))
    kept = {name: value for name, value in config.items() if name not in ("auto_map", "tokenizer_class")}
    kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    (directory / "tokenizer_config.json").write_text(json.dumps(kept))


def _content(token: Any) -> str | None:
    """Return a special token's text: tokenizer_config.json has a string, or an object with flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _load(directory: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


def _is_llama_like(directory: Path, kind: str | None) -> bool:
    return kind is not None or _read_json(directory / "config.json").get("model_type") in _LLAMA_LIKE


def _check_whole(directory: Path) -> None:
    """Raise `ModelLoadError` for an incomplete vocabulary: transformers would create an empty one."""
    names = {file.name for file in directory.iterdir()}
    wanted = {"merges.txt"} if "vocab.json" in names else {"vocab.json"} if "merges.txt" in names else set()
    if not names & set(_VOCABULARIES):
        wanted = {"tokenizer.json"}
    absent = sorted(wanted - names)
    if absent:
        raise ModelLoadError(
            f"can't load the tokenizer in {directory}: it has no {absent[0]}; download the tokenizer's files again, "
            "or serve token ids (skip_tokenizer_init)"
        )


_VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "spm.model",
                 "sentencepiece.bpe.model", "tekken.json", "tiktoken.model")  # fmt: skip


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ModelLoadError(f"can't read {file}: not a JSON object")
    return content
