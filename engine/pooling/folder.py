"""Pooling settings of a model directory. Does not run code from the directory.

A Sentence Transformers directory lists its modules in modules.json; a sequence classifier names its class in
config.json. Every module, activation and pooling is known here by its name, or rejected with an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pagemill.engine.errors import ModelLoadError

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Activation = Literal["identity", "tanh", "relu", "gelu", "silu", "sigmoid"]

_MODES: Final[dict[str, PoolingMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: Final[dict[str, Activation]] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout")
_TRANSFORMERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""Sentence Transformers searches for a Transformer's settings under these kinds, in this order."""
_LIBRARY = "sentence_transformers."
_VECTORS = "sentence_embedding"
_MAX_JSON_BYTES = 4 << 20
_MAX_MODULES = 32
_CLASSIFIER = "ForSequenceClassification"
_GENERATORS = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of a text's token vectors into one vector: the concatenated results of the modes."""

    modes: tuple[PoolingMode, ...] = ("mean",)
    include_prompt: bool = True
    """False: the tokens of the prompt before the text are attended to, but excluded here."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    directory: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: Activation


@dataclass(frozen=True, slots=True)
class LayerNormLayer:
    directory: Path
    dimension: int


VectorModule = DenseLayer | LayerNormLayer | Literal["normalize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderFolder:
    """A directory of a model that computes a vector per text."""

    transformer: Path
    """The folder of config.json, weights and tokenizer."""
    pooling: Pooling = Pooling()
    modules: tuple[VectorModule, ...] = ()
    """Modules after the pooling."""
    max_seq_length: int | None = None
    lowers_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of texts, by name."""
    default_prompt_name: str | None = None

    @property
    def normalizes(self) -> bool:
        return "normalize" in self.modules


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierFolder:
    """A directory of a model that computes one value per label for a text or a pair of texts."""

    transformer: Path
    labels: tuple[str, ...]
    pair_activation: Activation
    """Applied to a pair's score, as a cross-encoder's configuration specifies."""
    is_multi_label: bool = False
    """True if each label is scored independently."""
    max_seq_length: int | None = None


PoolingFolder = EmbedderFolder | ClassifierFolder


def read_pooling_folder(directory: Path) -> PoolingFolder | None:
    """Return the kind of the directory's model; None if it generates text.

    Raises:
        ModelLoadError: a file is unreadable, or contains an unsupported name.
    """
    if (directory / "modules.json").is_file():
        return _sentence_transformer(directory)
    config = _read_object(directory / "config.json")
    architecture = _architecture(config)
    if _CLASSIFIER in architecture:
        return _classifier(directory, config)
    if any(mark in architecture for mark in _GENERATORS):
        return None
    is_encoder = config.get("model_type") in ENCODER_TYPES
    # Like Sentence Transformers with a bare encoder: the mean over its tokens.
    return EmbedderFolder(transformer=directory) if is_encoder else None


ENCODER_TYPES = (
    "bert",
    "camembert",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "roberta",
    "xlm-roberta",
)
"""Values of `model_type` in config.json whose models are only used for vectors and scores."""


def _sentence_transformer(directory: Path) -> PoolingFolder:
    first, *others = _listed_modules(directory)
    name, path = first
    if name != "Transformer":
        raise ModelLoadError(f"{directory / 'modules.json'}: the first module is {name}, not Transformer")
    config = _read_object(path / "config.json")
    if not others and _CLASSIFIER in _architecture(config):
        return _classifier(path, config)
    if not others or others[0][0] != "Pooling":
        raise ModelLoadError(f"{directory / 'modules.json'}: no Pooling follows the Transformer")
    modules: list[VectorModule] = []
    for name, place in others[1:]:
        modules += _vector_module(name, place)
    files = (path / f"sentence_{kind}_config.json" for kind in _TRANSFORMERS)
    own = next((file for file in files if file.is_file()), path / "sentence_bert_config.json")
    settings = _read_object(own) if own.is_file() else {}
    prompts, default = _prompts(directory)
    return EmbedderFolder(
        transformer=path,
        pooling=_pooling(others[0][1] / "config.json"),
        modules=tuple(modules),
        max_seq_length=_size(settings, "max_seq_length", own),
        lowers_case=bool(settings.get("do_lower_case")),
        prompts=prompts,
        default_prompt_name=default,
    )


def _listed_modules(directory: Path) -> list[tuple[str, Path]]:
    """Return the modules of modules.json in order: the class's bare name, and the module's directory."""
    file = directory / "modules.json"
    listed = _read_json(file)
    if not isinstance(listed, list) or not 0 < len(listed) <= _MAX_MODULES:
        raise ModelLoadError(f"can't read {file}: not a list of 1 to {_MAX_MODULES} modules")
    found = []
    for entry in listed:
        kind, place = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str):
            raise ModelLoadError(f"can't read {file}: a module has no type or no path")
        name = kind.rpartition(".")[2]
        if not kind.startswith(_LIBRARY) or name not in _MODULES:
            raise ModelLoadError(
                f"{file}: module {kind[:200]!r} is not known, and no code of a model is run; "
                f"known: {', '.join(_MODULES)} of {_LIBRARY[:-1]}"
            )
        inside = (directory / place).resolve()
        if not inside.is_relative_to(directory.resolve()):
            raise ModelLoadError(f"{file}: module {kind!r} is outside the model's directory")
        found.append((name, directory / place))
    return found


def _pooling(file: Path) -> Pooling:
    settings = _read_object(file)
    modes: Any = settings.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _MODES.items() if settings.get(flag)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    known = get_args(PoolingMode)
    if not isinstance(modes, list) or not modes or not all(mode in known for mode in modes):
        raise ModelLoadError(f"{file}: pooling {str(modes)[:100]!r} is not known; known: {', '.join(known)}")
    return Pooling(tuple(modes), bool(settings.get("include_prompt", True)))


def _vector_module(name: str, directory: Path) -> list[VectorModule]:
    file = directory / "config.json"
    if name == "Dropout":
        return []
    settings = _read_object(file) if file.is_file() else {}
    for side in ("module_input_name", "module_output_name"):
        if settings.get(side) not in (None, _VECTORS):
            raise ModelLoadError(f"{file}: {side} {str(settings[side])[:100]!r} is not supported")
    if name == "Normalize":
        return ["normalize"]
    if name == "LayerNorm":
        return [LayerNormLayer(directory, _needed_size(settings, "dimension", file))]
    if name != "Dense":
        raise ModelLoadError(f"{file}: a second {name} is not supported")
    if settings.get("use_residual"):
        raise ModelLoadError(f"{file}: a Dense with use_residual is not supported")
    return [
        DenseLayer(
            directory,
            _needed_size(settings, "in_features", file),
            _needed_size(settings, "out_features", file),
            bool(settings.get("bias", True)),
            _activation(settings.get("activation_function", "torch.nn.modules.activation.Tanh"), file),
        )
    ]


def _prompts(directory: Path) -> tuple[dict[str, str], str | None]:
    file = directory / "config_sentence_transformers.json"
    settings = _read_object(file) if file.is_file() else {}
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelLoadError(f"{file}: prompts should be texts by name")
    if default is not None and default not in prompts:
        raise ModelLoadError(f"{file}: default_prompt_name {str(default)[:100]!r} is not among the prompts")
    return prompts, default


def _classifier(directory: Path, config: Mapping[str, Any]) -> ClassifierFolder:
    file = directory / "config.json"
    names = config.get("id2label")
    if names is None:
        count = config.get("num_labels", 2)
        if type(count) is not int or not 0 < count <= 1 << 16:
            raise ModelLoadError(f"{file}: num_labels is {str(count)[:100]}")
        names = {str(number): f"LABEL_{number}" for number in range(count)}
    try:
        labels = tuple(str(names[str(number)]) for number in range(len(names)))
    except (KeyError, TypeError):
        raise ModelLoadError(f"{file}: id2label should name the labels 0 to n - 1") from None
    if not labels:
        raise ModelLoadError(f"{file}: id2label names no label")
    own = config.get("sentence_transformers")
    said = own.get("activation_fn") if isinstance(own, dict) else None
    said = said or config.get("sbert_ce_default_activation_function")
    fallback: Activation = "sigmoid" if len(labels) == 1 else "identity"
    return ClassifierFolder(
        transformer=directory,
        labels=labels,
        pair_activation=fallback if said is None else _activation(said, file),
        is_multi_label=config.get("problem_type") == "multi_label_classification",
    )


def _activation(name: Any, file: Path) -> Activation:
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    raise ModelLoadError(
        f"{file}: activation {str(name)[:200]!r} is not known, and no code of a model is run; "
        f"known: {', '.join(_ACTIVATIONS)}"
    )


def _architecture(config: Mapping[str, Any]) -> str:
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else ""


def _needed_size(settings: Mapping[str, Any], name: str, file: Path) -> int:
    size = _size(settings, name, file)
    if size is None:
        raise ModelLoadError(f"{file}: {name} is missing")
    return size


def _size(settings: Mapping[str, Any], name: str, file: Path) -> int | None:
    size = settings.get(name)
    if size is not None and (type(size) is not int or not 0 < size < 1 << 31):
        raise ModelLoadError(f"{file}: {name} is {str(size)[:100]}")
    return size


def _read_object(file: Path) -> dict[str, Any]:
    content = _read_json(file)
    if not isinstance(content, dict):
        raise ModelLoadError(f"can't read {file}: not a JSON object")
    return content


def _read_json(file: Path) -> Any:
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise ModelLoadError(f"can't read {file}: it has more than {_MAX_JSON_BYTES} bytes")
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"can't read {file}: {error}") from error
