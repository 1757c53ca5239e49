"""Kernels that LLVM compiles once per entry point, regardless of how many kernels inline them.

By default numba optimizes every function, generates machine code for it, inlines the optimized code into each
caller, and starts again there. The bottom of a call tree is thus compiled once per level above. Here callers
inline the lowered, unoptimized code. Only the root of a tree is optimized and becomes machine code. A large
function with several roots as callers is a separate root, which the others call by its symbol.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

# isort: off
import torch  # noqa: F401  before numba: its OpenMP runtime must be the first one loaded
import llvmlite.binding
import numba

# isort: on
from numba.core import sigutils, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.types.containers import BaseTuple
from numba.core.types.misc import unliteral

from pagemill.kernels.cpu.jit import file_lock

_LONGEST_S = 300.0
"""Maximum time that a process waits for another to compile a kernel before it compiles the kernel too."""
_NO_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class _PartLibrary(JITCodeLibrary):
    """Code for callers to inline, including everything it calls."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0, as for code that is not compiled."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        """numba's information on a function's environment: empty, because it does not have an address yet."""
        return _Nowhere


class _Nowhere:
    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        pass


class PartCompiler(Compiler):
    """Leaves optimization and machine code generation to the root."""

    def define_pipelines(self) -> Any:
        state = self.state
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()


PART_OPTIONS = {**_NO_WRAPPERS, "pipeline_class": PartCompiler}
"""Options of `numba.jit` for functions with only compiled callers."""


def _check_references(kernel: CPUDispatcher, compiled: Any) -> None:
    """Raise TypeError if a kernel without reference counts owns an array: it would never be freed."""
    if kernel.targetoptions["_nrt"] or isinstance(compiled.type_annotation, str):  # loaded from disk
        return
    calls = compiled.type_annotation.calltypes.items()
    found = [call.return_type for expression, call in calls if getattr(expression, "op", None) == "call"]
    if any(map(_has_arrays, (*found, compiled.signature.return_type))):
        raise TypeError(
            f"{kernel.py_func.__qualname__} calls a function that returns arrays; set allocates=True"
        )


def _has_arrays(kind: Any) -> bool:
    return isinstance(kind, types.Array) or (isinstance(kind, BaseTuple) and any(map(_has_arrays, kind)))


class _Part(CPUDispatcher):
    """A function that compiled callers inline."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(function, {}, options | _NO_WRAPPERS, PartCompiler)

    def add_overload(self, compiled: Any) -> None:
        _check_references(self, compiled)
        super().add_overload(compiled)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Prevent a separate specialization for each constant."""
        return super().get_call_template(tuple(map(unliteral, args)), kws)


class _NoCode(_PartLibrary):
    """Replaces a root in its callers. Loading one of these first loads the root, to register its symbol."""

    def __init__(self, codegen: Any, name: str, load: Callable[[], None]) -> None:
        super().__init__(codegen, name)
        self._reload_init = {load}

    def _get_module_for_linking(self) -> Any:
        return self._final_module


class _Symbol(CPUDispatcher):
    """A function that compiled callers call by its symbol."""

    def __init__(self, kernel: Kernel, options: dict[str, Any]) -> None:
        super().__init__(kernel.py_func, {}, options | _NO_WRAPPERS)
        self._kernel = kernel

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return super().get_call_template(tuple(map(unliteral, args)), kws)

    def compile(self, sig: Any) -> Any:
        arguments, _ = sigutils.normalize_signature(sig)
        if arguments not in self.overloads:
            self._kernel.compile(arguments)
            self._declare(self._kernel.overloads[arguments])
        return self.overloads[arguments].entry_point

    def _declare(self, compiled: Any) -> None:
        arguments, function = compiled.signature.args, self.py_func
        address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        # The original name contains the number of functions that this process compiled before.
        described = copy.copy(compiled.fndesc)
        described.mangled_name = f"{function.__module__}.{function.__qualname__}.{_digest(arguments)}"
        llvmlite.binding.add_symbol(described.mangled_name, address)
        load = partial(_load, function.__module__, function.__qualname__, arguments)
        library = _NoCode(compiled.library.codegen, described.mangled_name, load)
        declared = compiled._replace(fndesc=described, library=library, entry_point=_Entry())
        self.targetctx.insert_user_function(declared.entry_point, described, [library])
        self.overloads[arguments] = declared


def _digest(arguments: Any) -> str:
    return hashlib.sha256(str(arguments).encode()).hexdigest()[:16]


class _Entry:
    """The key of a function called by its symbol; replaces the function that Python would call."""


def _load(module: str, name: str, arguments: Any) -> None:
    getattr(importlib.import_module(module), name).part.compile(arguments)


class Kernel(CPUDispatcher):
    """A root when called from Python. Compiled callers inline its part, or call it by its symbol."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], *, by_symbol: bool) -> None:
        options = {"nopython": True, "no_cfunc_wrapper": True, **options}
        super().__init__(function, {}, options)
        self.part = _Symbol(self, options) if by_symbol else _Part(function, options)

    @property
    def _numba_type_(self) -> Any:
        return types.Dispatcher(self.part)

    def add_overload(self, compiled: Any) -> None:
        _check_references(self, compiled)
        for environment in compiled._find_referenced_environments():  # including those of the parts
            compiled.codegen.set_env(environment.env_name, environment)
        super().add_overload(compiled)

    def compile(self, sig: Any) -> Any:
        """Compile it, or load it from disk; wait if another process is compiling it."""
        arguments, _ = sigutils.normalize_signature(sig)
        function = self.py_func
        name = f"{function.__module__}.{function.__qualname__}.{_digest(arguments)}.lock"
        with (
            global_compiler_lock,  # first: a thread that holds it can be waiting for the file
            nullcontext() if arguments in self.overloads else file_lock.hold(directory() / name, _LONGEST_S),
        ):
            return super().compile(sig)


def directory() -> Path:
    """Return the directory of machine code, which depends on the kernels' sources."""
    return Path(numba.config.CACHE_DIR)
