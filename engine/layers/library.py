"""transformers' model classes, imported without what only training and compiling need.

While it is imported, transformers.modeling_utils marks functions for torch's compiler and asks for torch's distributed
tensors. Neither is used here, and both bring thousands of modules: a third of what importing it takes. So the
compiler is stood in for while marks are made, and transformers is told that torch has no distributed package, as on the
platforms that lack it (ranks talk through torch.distributed themselves: `parallel.rank_group`).

Nor has it Hugging Face's `kernels`: it would take our package of that name for it, search every installed distribution
for its version, and believe in it should that version ever fit.

A process that has imported transformers' models already, or that runs under torchrun, has everything as it is.
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
    """transformers' class for a configuration of its own; imports that model's code and no other's."""

    def find() -> Any:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        return MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]

    return _without_compiler(find)


def _import_models() -> Any:
    def load() -> Any:
        importlib.import_module(_MODEL_CLASSES)  # what some versions' configurations import as well
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
    except Exception:  # a version that needs more of the compiler than marks; other errors come again
        return load()


@contextmanager
def _listing_models_once() -> Iterator[None]:
    """transformers reads all of its models' files for the names in them, by their directory and by its __init__.py.

    It remembers the answer by what it was asked, so the second question is put in the words of the first.
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
    """For good: modules that were imported without must not think later that they were imported with."""
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
    """Marks for the compiler that are made within mark nothing. Later imports get the compiler itself."""
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
    # Its submodules are the real ones: one of them, a small one, is used for more than marks.
    stand_in.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
    for name in _MARKS:
        setattr(stand_in, name, _mark_nothing)
    return stand_in  # type: ignore[no-any-return]


def _mark_nothing(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return _mark_nothing if function is None else function


_models = _import_models()
ALL_ATTENTION_FUNCTIONS: Any = _models.ALL_ATTENTION_FUNCTIONS
ROPE_INIT_FUNCTIONS: Any = _models.ROPE_INIT_FUNCTIONS
_SILU = type(importlib.import_module("transformers.activations").ACT2FN["silu"])


def is_silu(activation: Any) -> bool:
    """Whether a module computes x * sigmoid(x): torch's or transformers' own."""
    return isinstance(activation, (torch.nn.SiLU, _SILU))
