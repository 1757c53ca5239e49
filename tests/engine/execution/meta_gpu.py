"""CUDA's path without a GPU and without values: tensors on torch's `meta` device represent those of a GPU.

All of the engine's own code runs, up to the launches of its kernels; a launch checks the devices of its tensors, and
computes nothing. Every operation passes two modes, which record operations that a GPU would reject or wait for:

- mixed devices: an operation or a launch with tensors of the host and of the device;
- read-back: the host needs values of the device (`.item()`, `.tolist()`, a size that depends on values);
- pageable copy: between the device and host memory that is not pinned, which waits for the stream.

The modes also let the code continue: a value that is read back is 0, and `.all()` is true.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils
from triton.runtime.jit import JITFunction

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.backend import DeviceEvent, Reached
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.execution import cuda_graphs, kernel_check
from pagemill.kernels import dispatch
from pagemill.kernels.gpu import tuning
from tests.conftest import ROOT

META = torch.device("meta")
MIXED, READ, PAGEABLE = "mixed devices", "read-back", "pageable copy"
_TRANSFORMERS = str(Path(transformers.__file__).parent)
_PLACES = {f"{_TRANSFORMERS}/": "transformers/", f"{ROOT}/pagemill/": ""}
_READING = "engine/execution/model_runner.py:wait"
"""Waits for a step's results. Reads without an earlier copy are not findings here, but slow."""
_SIZED_BY_NUMBERS = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    kind: str
    place: str
    """File and function."""
    stage: str
    """"rehearsal", "capture" or "step"."""


@dataclass(slots=True)
class Watch:
    """Counts findings. Outside a stage, for example while a model is loaded, there are none."""

    findings: Counter[Finding] = field(default_factory=Counter)
    details: dict[Finding, str] = field(default_factory=dict)
    """For each, the operation and the calls that led to it."""
    stage: str | None = None

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    def note(self, kind: str, operation: str) -> None:
        if self.stage is None:
            return
        calls = _calls()
        if any(place == _READING for place, _ in calls):
            return
        finding = Finding(kind, calls[0][0], self.stage)
        self.findings[finding] += 1
        self.details[finding] = f"{operation}: " + " < ".join(f"{place}:{line}" for place, line in calls[:5])

    def report(self) -> str:
        return "\n".join(f"{one.kind} in a {one.stage}, {self.details[one]}" for one in self.findings)


def _calls() -> list[tuple[str, int]]:
    """Return (file and function, line) of the calls in Pagemill and transformers, the innermost first."""
    calls: list[tuple[str, int]] = []
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        for root, short in _PLACES.items():
            if code.co_filename.startswith(root):
                name = short + code.co_filename.removeprefix(root)
                calls.append((f"{name}:{code.co_name}", frame.f_lineno))
        frame = frame.f_back
    return calls or [("elsewhere", 0)]


class _Functions(TorchFunctionMode):
    """Sees calls that do not reach a dispatcher: pinned memory, addresses, and copies of Python's lists."""

    def __init__(self, watch: Watch, pinned: set[int]) -> None:
        super().__init__()
        self._watch, self._pinned = watch, pinned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return self._pin(args[0].clone())
        if name == "data_ptr" and args[0].device == META:
            return id_of(args[0]) + args[0].storage_offset() * args[0].element_size()
        if name == "__get__" and getattr(func.__self__, "__name__", "") == "is_cuda":
            return args[0].device == META
        out = func(*args, **kwargs)
        is_made = name == "new_tensor" or (
            name in ("tensor", "as_tensor") and not isinstance(args[0], torch.Tensor)
        )
        if is_made and out.device == META:
            self._watch.note(PAGEABLE, name)
        elif name in ("__getitem__", "__setitem__") and args[0].device == META and _has_list(args[1]):
            self._watch.note(PAGEABLE, f"{name} of a list")
        return out

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned.add(id_of(tensor))
        return tensor


def id_of(tensor: torch.Tensor) -> int:
    """Return a substitute for the address of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def _has_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list | range) for part in parts)


@cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


class _Operations(TorchDispatchMode):
    """Sees every operation."""

    def __init__(self, watch: Watch, pinned: set[int]) -> None:
        super().__init__()
        self._watch, self._pinned = watch, pinned
        self._all: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in ("copy_", "_to_copy"):
            return self._copy(func, name, args, kwargs)
        if _is_composite(func):
            with self:  # under inference_mode they are not decomposed
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if all(tensor.device != META for tensor in tensors):
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            self._watch.note(READ, name)
            return id_of(args[0]) in self._all or torch.zeros((), dtype=args[0].dtype).item()
        if name == "equal":
            self._watch.note(READ, name)
            return True
        if name in _SIZED_BY_NUMBERS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self._watch.note(READ, name)
        if name in ("index", "index_put_", "_index_put_impl_"):
            args = (args[0], self._indices(name, args), *args[2:])
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device != META and tensor.ndim for tensor in tensors):
            self._watch.note(MIXED, name)
        if name == "all":
            out = func(*args, **kwargs)
            self._all.add(id_of(out))
            return out
        if name == "nonzero":
            return args[0].new_empty(args[0].numel(), args[0].ndim, dtype=torch.int64)
        return func(*args, **kwargs)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Copy within a device, or between two."""
        is_new = name == "_to_copy"
        source = args[0 if is_new else 1]
        target = (kwargs.get("device") or source.device) if is_new else args[0].device
        if target == source.device or META not in (target, source.device):
            return func(*args, **kwargs)
        is_read = source.device == META
        if is_read and is_new:
            self._watch.note(READ, name)
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        host = args[0] if is_read else source
        waits = not (kwargs.get("non_blocking") if is_new else len(args) > 2 and args[2])
        if waits or id_of(host) not in self._pinned:
            self._watch.note(PAGEABLE, name)
        return host.zero_() if is_read else func(*args, **kwargs)

    def _indices(self, name: str, args: Any) -> list[torch.Tensor | None]:
        """Return the indices without boolean ones, whose number of rows the host would have to know."""
        indices: list[torch.Tensor | None] = []
        fills = name != "index" and args[2].numel() == 1 and len(args[1]) == 1
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8) and not fills:
                self._watch.note(READ, f"{name} by booleans")
                indices += [torch.empty(index.numel(), dtype=torch.int64, device=META)] * index.ndim
            else:
                indices.append(index)
        return indices


class MetaCuda(CudaBackend):
    """A CUDA device without memory."""

    device = META

    def __init__(self, watch: Watch, capability: tuple[int, int]) -> None:
        self._watch, self._compute_capability = watch, capability

    def check(self, config: EngineConfig, dtype: torch.dtype) -> None:
        pass

    def _capability(self) -> tuple[int, int]:
        return self._compute_capability

    def mark(self) -> DeviceEvent:
        return Reached()

    def total_bytes(self) -> int:
        return 2**36

    def free_bytes(self, config: EngineConfig) -> int:
        return 2**30

    def peak_bytes(self, run: Callable[[], None]) -> int:
        with self._watch.during("rehearsal"):
            run()
        return 0


@contextmanager
def meta_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[tuple[MetaCuda, Watch]]:
    """Let tensors on the meta device take CUDA's paths, with checks, until the end of the block."""
    watch, pinned = Watch(), set[int]()
    default_face = dispatch._default_face

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if any(tensor.device != META for tensor in tensors):
            watch.note(MIXED, kernel.fn.__name__)

    def capture(run: Callable[[], object], *_: Any, **__: Any) -> Callable[[], object]:
        with watch.during("capture"):
            run()
        return run

    tuning.compute_capability.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", launch)
        patch.setattr(
            dispatch, "_default_face", lambda kind: default_face("cuda" if kind == "meta" else kind)
        )
        patch.setattr(tuning, "_ASSUMED_CAPABILITY", capability)
        patch.setattr(tuning, "_ASSUMED_MULTIPROCESSORS", 132)
        patch.setattr(cuda_graphs, "capture_graph", capture)
        # Kernels compute nothing here, so there is nothing to compare.
        patch.setattr(kernel_check, "check_kernels", lambda *_, **__: 0)
        # Whether positions restart, which is read back while a model is observed: here they do not.
        patch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)
        with _Functions(watch, pinned), _Operations(watch, pinned):
            yield MetaCuda(watch, capability), watch
    tuning.compute_capability.cache_clear()
