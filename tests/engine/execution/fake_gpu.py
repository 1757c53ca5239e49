"""An engine on CUDA's path without a GPU: kernels are compiled and launched into a driver that does nothing.

Values come from the reference operators; for each of them the Triton kernel of the same call is launched, with the same
arguments, through Triton's own specialization. It is a separate program, since a process has one Triton driver:

    python -m tests.engine.execution.fake_gpu DIRECTORY [OPTIONS]    # prints JSON: what was compiled when
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices import registry
from pagemill.engine.devices.backend import DeviceBackend, DeviceEvent, HostCopy, Reached
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.execution import cuda_graphs
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels import dispatch, experts, recurrence, reference, row_scaled
from pagemill.kernels.gpu import tuning


class _Utils:
    def load_binary(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 64, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132, "warpSize": 32}

    def unload_module(self, *_: Any) -> None:
        pass


class _Launcher:
    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> None:
        pass


class _Driver:
    """An sm_90 that accepts everything and does nothing."""

    utils = _Utils()
    launcher_cls = _Launcher

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


class FakeCuda(CudaBackend):
    """CUDA's choices, in the host's memory."""

    device = torch.device("cpu")
    is_apart = False

    def check(self, config: EngineConfig, dtype: torch.dtype) -> None:
        pass

    def _capability(self) -> tuple[int, int]:
        return 9, 0

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        return HostCopy(list(tensors))

    def mark(self) -> DeviceEvent:
        return Reached()

    def total_bytes(self) -> int:
        return 2**34

    def free_bytes(self, config: EngineConfig) -> int:
        return 2**28

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        return 0


class Launches:
    """Counts the variants that Triton has compiled, by kernel."""

    def __init__(self) -> None:
        self._compiled: Counter[str] = Counter()
        create = JITFunction._do_compile

        def compile_and_count(kernel: Any, *given: Any, **named: Any) -> Any:
            self._compiled[kernel.fn.__name__] += 1
            return create(kernel, *given, **named)

        JITFunction._do_compile = compile_and_count
        self.rounds: dict[str, dict[str, int]] = {}

    def note(self, name: str) -> None:
        """Record the variants that were compiled since the last record."""
        self.rounds[name] = dict(self._compiled)
        self._compiled.clear()


def plain(name: str) -> Callable[..., Any]:
    """Return an operator in plain torch."""
    home = next(module for module in (reference, row_scaled, recurrence, experts) if hasattr(module, name))
    compute: Callable[..., Any] = getattr(home, name)
    return compute


def install() -> Launches:
    """Make this process's engines use a fake GPU."""
    driver.set_active(_Driver())
    launches = Launches()
    triton = dispatch._load("triton")

    def both(name: str) -> Callable[..., Any]:
        launch = triton[name]
        compute = plain(name)

        def call(*given: Any, **named: Any) -> Any:
            launch(*given, **named)
            return compute(*given, **named)

        return call

    face = {name: both(name) for name in triton}
    dispatch._load = lambda _: face  # type: ignore[assignment]
    tuning.multiprocessors = lambda device: 132  # type: ignore[assignment]
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("pagemill.kernels.gpu.") and hasattr(
            module, "multiprocessors"
        ):
            module.multiprocessors = tuning.multiprocessors  # type: ignore[attr-defined]
    fake: DeviceBackend = FakeCuda()
    registry.find_device = lambda name: fake
    cuda_graphs.capture_graph = lambda run, pool: (run(), run)[1]  # type: ignore[assignment]
    return launches


def main(directory: str, options: str = "{}") -> None:
    """`options`: an `EngineConfig`'s, as JSON."""
    torch.set_num_threads(1)
    launches = install()
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True, "dtype": "bfloat16", "num_kv_blocks": 600, "max_num_seqs": 24,
        "max_num_batched_tokens": 256, "max_model_len": 2048, "stage_inputs": True, "async_scheduling": True,
    }  # fmt: skip
    llm = LLM(directory, **(settings | json.loads(options)))
    launches.note("start")
    rng = random.Random(1)

    def serve(count: int, longest: int, adapter: str | None = None, **options: Any) -> None:
        prompts = [[rng.randrange(3, 200) for _ in range(rng.randrange(1, longest))] for _ in range(count)]
        params = [
            SamplingParams(
                temperature=0.7 * (number % 2), seed=number, max_tokens=rng.randrange(2, 20), ignore_eos=True,
                **options,
            )
            for number in range(count)
        ]  # fmt: skip
        llm.generate(prompts, params, adapter=adapter, use_tqdm=False)

    serve(1, 40)
    serve(5, 150)
    launches.note("a few requests")
    for _ in range(3):
        serve(19, 300)
    launches.note("many")
    serve(9, 60, top_p=0.9)
    serve(3, 60, top_k=5, min_p=0.1)
    launches.note("filters")
    serve(6, 60, n=3)
    serve(2, 60, logprobs=3, presence_penalty=0.4)
    serve(1, 1900)
    launches.note("forks, penalties, a long prompt")
    for adapter in llm.engine._parts.adapters.registered():
        serve(5, 150, adapter.name)
        serve(1, 20, adapter.name)
    launches.note("adapters")
    sys.stdout.write(json.dumps(launches.rounds) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
