"""The sampling parameters that a model's authors recommend: defaults for requests that do not set them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagemill.common.sampling_fields import MODEL_DEFAULTS
from pagemill.engine.errors import InvalidRequest, ModelLoadError
from pagemill.engine.json_files import read_json_object
from pagemill.engine.sampling_params import SamplingParams

GENERATION_CONFIG = "generation_config.json"
_WHOLE = ("top_k", "max_tokens")
_INSTEAD = "set generation_config to none, or to a folder with a corrected file"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's defaults, without those equal to Pagemill's."""

    sampling: Mapping[str, float] = field(default_factory=dict)
    """Names of `MODEL_DEFAULTS`."""
    max_tokens: int | None = None
    """Maximum number of output tokens of a request without a limit; None: the rest of the context."""

    def __bool__(self) -> bool:
        return bool(self.sampling) or self.max_tokens is not None

    def __str__(self) -> str:
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return ", ".join(f"{name} {value:g}" for name, value in {**self.sampling, **limit}.items())


NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(setting: str, directory: Path) -> SamplingDefaults:
    """Return the sampling parameters of a model's generation_config.json.

    As in vLLM, `do_sample` is ignored: a request for the most probable tokens sets temperature 0.

    Args:
        setting: `EngineConfig.generation_config`: "auto", "none", or a folder with another file.
        directory: the model's folder.

    Returns:
        The defaults; empty for a model without the file.

    Raises:
        ModelLoadError: the file is not a JSON object, or a value is out of its range.
    """
    file = (directory if setting == "auto" else Path(setting).expanduser()) / GENERATION_CONFIG
    if setting == "none" or not file.is_file():
        return NO_DEFAULTS
    content = read_json_object(file)
    unset = SamplingParams(max_tokens=None)
    found = {}
    for name, key in {**{name: name for name in MODEL_DEFAULTS}, "max_tokens": "max_new_tokens"}.items():
        value = content.get(key)
        if value is not None and (number := _number(name, value, file)) != getattr(unset, name):
            found[name] = number
    most = found.pop("max_tokens", None)
    return SamplingDefaults(found, None if most is None else int(most))


def _number(name: str, value: object, file: Path) -> float:
    """Return a value of the file. Raises ModelLoadError if it is invalid in a request."""
    is_whole = name in _WHOLE
    if isinstance(value, float) and is_whole and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        raise ModelLoadError(f"{file}: {name} is not a number of its kind; {_INSTEAD}")
    try:
        SamplingParams(**{"max_tokens": None, name: value})  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise ModelLoadError(f"{file}: {str(error)[:200]}; {_INSTEAD}") from None
    return value
