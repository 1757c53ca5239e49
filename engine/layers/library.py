"""transformers' model classes, imported without the parts needed only for training and compiling.

At import, transformers.modeling_utils marks functions for torch's compiler and searches for torch's
distributed tensors. Neither is used here, and both import thousands of modules: a third of its import time.
Therefore transformers' marks do not have an effect during the import, and transformers' checks report that torch has no
distributed package, as on platforms that lack it (ranks use torch.distributed directly: `parallel.rank_group`).
Other libraries that transformers imports where they are installed, such as torchao, get the real compiler.

Hugging Face's `kernels` is hidden as well: transformers would mistake Pagemill's package of that name for it, search
every installed distribution for its version, and use it if that version matched.

A process that has already imported transformers' models, or that runs under torchrun, is left unchanged.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_MODELS = "transformers.modeling_utils"
_MODEL_CLASSES = "transformers.models.auto.modeling_auto"
_COMPILER = "torch._dynamo"
_LOSSES = "transformers.loss."
_NOT_AVAILABLE = ("is_torch_distributed_available", "is_kernels_available")
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")
_MASK_HELPER = "_trace_wrapped_higher_order_op"


def causal_lm_class(model_config: Any) -> Any:
    """Return transformers' class for one of its configurations; imports only that model's code."""

    return model_class("MODEL_FOR_CAUSAL_LM_MAPPING", model_config)


def model_class(mapping: str, model_config: Any) -> Any:
    """Return the class for a configuration in one of transformers' mappings."""
    import transformers

    with _unmarked():
        return getattr(transformers, mapping)[type(model_config)]


def register_mask_function(name: str, function: Callable[..., Any]) -> None:
    """Make transformers call `function` for the masks of an attention implementation."""
    with _unmarked():
        masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    masks.register(name, function)


def _import_models() -> Any:
    def load() -> Any:
        importlib.import_module(_MODEL_CLASSES)  # some versions' configurations import it too
        return importlib.import_module(_MODELS)

    if _MODELS in sys.modules or "LOCAL_RANK" in os.environ:
        return load()
    _hide_packages()
    with _listing_models_once(), _unmarked(), _without_scipy():
        return load()


@contextmanager
def _listing_models_once() -> Iterator[None]:
    """transformers scans all of its models' files for their names, once by directory and once by __init__.py.

    It caches the result by its arguments, so the second call is redirected to those of the first.
    """
    from transformers.utils import import_utils

    name = "create_import_structure_from_path"
    original = getattr(import_utils, name, None)
    if original is None:
        yield
        return

    def by_directory(path: Any) -> Any:
        return original(Path(path).parent if Path(path).name == "__init__.py" else path)

    setattr(import_utils, name, by_directory)
    try:
        yield
    finally:
        setattr(import_utils, name, original)


@contextmanager
def _without_scipy() -> Iterator[None]:
    """Keep scipy, a third of a second, from being imported for losses of object detection; import it on first use."""
    from transformers import utils

    name, function = "is_scipy_available", "linear_sum_assignment"
    original = getattr(utils, name, None)
    if original is None:
        yield
        return

    def assign(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module("scipy.optimize"), function)(*arguments, **options)

    setattr(utils, name, _is_not_available)
    try:
        yield
    finally:
        setattr(utils, name, original)
        for module in [module for key, module in sys.modules.items() if key.startswith(_LOSSES)]:
            if vars(module).get(name) is _is_not_available:
                setattr(module, name, original)
                setattr(module, function, assign)


def _hide_packages() -> None:
    """Hide packages permanently: modules imported without them must not find them later."""
    from transformers import utils
    from transformers.utils import import_utils

    for module in (utils, import_utils):
        for name in _NOT_AVAILABLE:
            if hasattr(module, name):
                setattr(module, name, _is_not_available)


def _is_not_available(*_: Any, **__: Any) -> bool:
    return False


@contextmanager
def _unmarked() -> Iterator[None]:
    """Skip compiler marks of transformers' functions inside the block, so that they do not import the compiler.

    torch._dynamo itself stays importable: a library that imports it inside the block gets the real package.
    """
    if _COMPILER in sys.modules:
        yield
        return
    _load_mask_helper()
    skipping = _SkippedMarks()
    originals = {name: getattr(torch.compiler, name) for name in _MARKS}
    vars(torch)["_dynamo"] = skipping
    for name, original in originals.items():
        setattr(torch.compiler, name, _skip_for_transformers(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.compiler, name, original)
        if vars(torch).get("_dynamo") is skipping:  # otherwise the package was imported and has replaced it
            del vars(torch)["_dynamo"]


class _SkippedMarks:
    """Placeholder for `torch._dynamo` until the package is imported: has its marks, and loads the rest on demand."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MARKS:
            return getattr(importlib.import_module(_COMPILER), name)
        return _skip_for_transformers(
            lambda *a, **k: getattr(importlib.import_module(_COMPILER), name)(*a, **k)
        )


def _skip_for_transformers(mark: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that leaves transformers' functions unchanged and applies `mark` to all others."""

    def decorate(function: Callable[..., Any] | None = None, *arguments: Any, **options: Any) -> Any:
        if function is None:  # called with options only
            return lambda decorated: decorate(decorated, *arguments, **options)
        if getattr(function, "__module__", "").partition(".")[0] == "transformers":
            return function
        return mark(function, *arguments, **options)

    return decorate


def _load_mask_helper() -> None:
    """Load the one submodule of the compiler that transformers' masks import, without its package.

    If a version of torch does not have this file, the import of transformers loads the package.
    """
    file = Path(torch.__file__).parent / "_dynamo" / f"{_MASK_HELPER}.py"
    name = f"{_COMPILER}.{_MASK_HELPER}"
    if name in sys.modules or not file.exists():
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception:  # this version's file needs the package
        del sys.modules[name]


_models = _import_models()
ALL_ATTENTION_FUNCTIONS: Any = _models.ALL_ATTENTION_FUNCTIONS
ROPE_INIT_FUNCTIONS: Any = _models.ROPE_INIT_FUNCTIONS
CAUSAL_LM_NAMES: Any = sys.modules[_MODEL_CLASSES].MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
CONFIG_NAMES: Any = sys.modules[_MODEL_CLASSES].CONFIG_MAPPING_NAMES
_caches = importlib.import_module("transformers.cache_utils")
DynamicCache: Any = _caches.DynamicCache
DynamicLayer: Any = _caches.DynamicLayer
CacheLayerMixin: Any = _caches.CacheLayerMixin
LinearAttentionLayer: Any = _caches.LinearAttentionLayer
LinearAttentionCacheLayerMixin: Any = _caches.LinearAttentionCacheLayerMixin
_SILU = type(importlib.import_module("transformers.activations").ACT2FN["silu"])


def tasks_of(model_type: str) -> frozenset[str]:
    """Return the names of transformers' mappings with a model of this type; empty if the type is unknown."""
    if model_type not in CONFIG_NAMES:
        return frozenset()
    mappings = vars(sys.modules[_MODEL_CLASSES])
    return frozenset(
        {"CONFIG"}
        | {name for name in mappings if name.endswith("_MAPPING_NAMES") and model_type in mappings[name]}
    )


def is_silu(activation: Any) -> bool:
    """Return True if a module computes x * sigmoid(x): torch's or transformers' own."""
    return isinstance(activation, (torch.nn.SiLU, _SILU))


_GATE = "_apply_gate"


def gate_of(experts: Any) -> tuple[Callable[[torch.Tensor], torch.Tensor], bool]:
    """Return the method of a transformers experts module that combines gates and up projections.

    Also return True if it computes act_fn(gate) * up, with the gates first.
    """
    default = vars(importlib.import_module("transformers.integrations.moe"))["_default_apply_gate"]
    return getattr(experts, _GATE), getattr(type(experts), _GATE) is default
