"""transformers' model classes, imported without the parts needed only for training and compiling.

While it is imported, transformers.modeling_utils marks functions for torch's compiler and looks for torch's
distributed tensors. Neither is used here, and both import thousands of modules: a third of its import time.
So a stand-in replaces the compiler during the marking, and transformers is told that torch has no distributed
package, as on the platforms that lack it (ranks use torch.distributed directly: `parallel.rank_group`).

Hugging Face's `kernels` is hidden as well: transformers would mistake our package of that name for it, search
every installed distribution for its version, and use it if that version ever matched.

A process that has already imported transformers' models, or that runs under torchrun, is left unchanged.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_MODELS = "transformers.modeling_utils"
_MODEL_CLASSES = "transformers.models.auto.modeling_auto"
_COMPILER = "torch._dynamo"
_NOT_AVAILABLE = ("is_torch_distributed_available", "is_kernels_available")
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")


def causal_lm_class(model_config: Any) -> Any:
    """Return transformers' class for one of its configurations; imports only that model's code."""

    return model_class("MODEL_FOR_CAUSAL_LM_MAPPING", model_config)


def model_class(mapping: str, model_config: Any) -> Any:
    """Return the class that one of transformers' mappings has for a configuration."""

    def find() -> Any:
        import transformers

        return getattr(transformers, mapping)[type(model_config)]

    return _without_compiler(find)


def register_mask_function(name: str, function: Callable[..., Any]) -> None:
    """Make transformers ask `function` for the masks of an attention implementation."""

    def masks() -> Any:
        return importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS

    _without_compiler(masks).register(name, function)


def _import_models() -> Any:
    def load() -> Any:
        importlib.import_module(_MODEL_CLASSES)  # some versions' configurations import it too
        return importlib.import_module(_MODELS)

    if _MODELS in sys.modules or "LOCAL_RANK" in os.environ:
        return load()
    _hide_packages()
    with _listing_models_once():
        return _without_compiler(load)


def _without_compiler(load: Callable[[], Any]) -> Any:
    try:
        with _marking_nothing():
            return load()
    except Exception:  # a version that uses the compiler for more than marks; other errors recur
        return load()


@contextmanager
def _listing_models_once() -> Iterator[None]:
    """transformers scans all of its models' files for their names, once by directory and once by __init__.py.

    It caches the answer by its arguments, so the second call is given those of the first.
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


def _hide_packages() -> None:
    """Hide packages permanently: modules imported without them must not assume later that they are there."""
    from transformers import utils
    from transformers.utils import import_utils

    for module in (utils, import_utils):
        for name in _NOT_AVAILABLE:
            if hasattr(module, name):
                setattr(module, name, _is_not_available)


def _is_not_available(*_: Any, **__: Any) -> bool:
    return False


@contextmanager
def _marking_nothing() -> Iterator[None]:
    """Make compiler marks inside the block do nothing. Later imports get the compiler itself."""
    if _COMPILER in sys.modules:
        yield
        return
    stand_in = _stand_in_for_compiler()
    sys.modules[_COMPILER] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(_COMPILER) is stand_in:
            del sys.modules[_COMPILER]
        if vars(torch).get("_dynamo") is stand_in:
            del vars(torch)["_dynamo"]


def _stand_in_for_compiler() -> ModuleType:
    stand_in: Any = ModuleType(_COMPILER)
    # Its submodules are the real ones: a small one of them is used for more than marks.
    stand_in.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
    for name in _MARKS:
        setattr(stand_in, name, _mark_nothing)
    return stand_in  # type: ignore[no-any-return]


def _mark_nothing(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return _mark_nothing if function is None else function


_models = _import_models()
ALL_ATTENTION_FUNCTIONS: Any = _models.ALL_ATTENTION_FUNCTIONS
ROPE_INIT_FUNCTIONS: Any = _models.ROPE_INIT_FUNCTIONS
CAUSAL_LM_NAMES: Any = sys.modules[_MODEL_CLASSES].MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
CONFIG_NAMES: Any = sys.modules[_MODEL_CLASSES].CONFIG_MAPPING_NAMES
_SILU = type(importlib.import_module("transformers.activations").ACT2FN["silu"])


def tasks_of(model_type: str) -> frozenset[str]:
    """Return the names of transformers' mappings that have a model of this type; none if it has no such type."""
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
    """Return what one of transformers' experts modules makes of gates and up projections, a method of it.

    And True if that is act_fn(gate) * up, the gates first.
    """
    default = vars(importlib.import_module("transformers.integrations.moe"))["_default_apply_gate"]
    return getattr(experts, _GATE), getattr(type(experts), _GATE) is default
