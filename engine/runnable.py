"""Checks whether a model can be run, from its config.json and file headers; no tensor is read."""

from __future__ import annotations

from pathlib import Path

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.checkpoint import check_header, read_config, read_scheme, weight_files
from pagemill.engine.models.families.registry import find_family
from pagemill.engine.models.formats.pickled import find_pickles
from pagemill.engine.pooling.folder import read_pooling_folder
from pagemill.engine.text.sampling_defaults import read_sampling_defaults
from pagemill.engine.text.tokenizer import load_tokenizer


def check_config(directory: Path) -> None:
    """Raise `ModelLoadError` if config.json names a model that a worker would reject."""
    if read_pooling_folder(directory) is not None:
        return
    raw = read_config(directory)
    read_scheme(directory)
    family = find_family(raw)
    try:
        family.build_config(raw)
    except ModelLoadError:
        raise
    except Exception as error:  # the file can make transformers' validation raise anything
        message = " ".join(str(error).split())  # some have several lines
        raise ModelLoadError(f"can't read {directory / 'config.json'}: {message}") from error


def check_files(config: EngineConfig, directory: Path) -> None:
    """Check the sizes of the weight files, and load the tokenizer.

    Raises:
        ModelLoadError: a file is missing or truncated. Pickled weights are not inspected.
        ConfigError: the tokenizer's files are broken.
    """
    folder = read_pooling_folder(directory)
    weights = directory if folder is None else folder.transformer
    is_stored = config.load_format != "dummy"
    if is_stored and (any(weights.glob("*.safetensors")) or not find_pickles(weights)):
        for file in weight_files(weights):
            check_header(file)
    read_sampling_defaults(config.generation_config, weights)
    if not config.skip_tokenizer_init and load_tokenizer(weights, config.chat_template) is None:
        raise lacks_tokenizer(config)


def lacks_tokenizer(config: EngineConfig) -> ModelLoadError:
    return ModelLoadError(
        f"{config.model} has no tokenizer, so each job with a text would fail: download its files too, or serve token "
        "ids (skip_tokenizer_init)"
    )


def reason_not_runnable(directory: Path) -> str | None:
    """Return the reason why the model in a directory cannot be run; None if no reason is known."""
    try:
        check_config(directory)
        weight_files(directory)
        read_sampling_defaults("auto", directory)
    except ModelLoadError as error:
        return str(error)
    return None
