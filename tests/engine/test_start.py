"""Work that startup avoids, by imports and calls, not by the clock (`benchmarks/startup.py` measures that)."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import initialization

from pagemill.engine import builder
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.engine import Engine
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.loader import load_model
from tests.conftest import ROOT, run_python
from tests.engine.tiny_model import save_tiny_llama

READY = """
import sys
from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams

llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, kv_cache_memory_bytes=2**22)
result = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
assert len(result[0].outputs[0].token_ids) == 4
unwanted = {
    "sympy", "triton", "scipy.optimize",
    "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor",
    "transformers.models.bloom.modeling_bloom", "transformers.models.falcon.modeling_falcon",
    "transformers.models.gptj.modeling_gptj", "transformers.models.mpt.modeling_mpt",
}
assert not unwanted & sys.modules.keys(), unwanted & sys.modules.keys()
assert "transformers.models.llama.modeling_llama" in sys.modules

from transformers.utils import import_utils
from transformers.utils.import_utils import create_import_structure_from_path

searched = getattr(import_utils, "_package_distribution_mapping", None)
assert searched is None or searched.cache_info().currsize == 0, "every installed distribution was searched for a name"
assert not import_utils.is_kernels_available(), "our package of that name is not Hugging Face's"

assert create_import_structure_from_path.cache_info().hits, "all of the models' files were read twice"

import torch
import transformers.masking_utils
from pagemill.engine.layers import library

library.register_mask_function("another", lambda: None)
import torch._dynamo._trace_wrapped_higher_order_op as helper

assert transformers.masking_utils.TransformGetItemToIndex is helper.TransformGetItemToIndex, "loaded twice"
assert callable(torch._dynamo.optimize), "whoever wants the compiler gets it"
double = torch.compile(lambda x: x + x, backend="eager")
assert double(torch.ones(2)).tolist() == [2.0, 2.0]

from transformers.loss import loss_for_object_detection as losses
from transformers.utils import is_scipy_available

assert losses.is_scipy_available is is_scipy_available
if is_scipy_available():
    assert losses.linear_sum_assignment(torch.eye(2).numpy(), maximize=True)[1].tolist() == [0, 1]
"""

UNTOUCHED = """
import sys
if sys.argv[1] == "imported before":
    import transformers.modeling_utils
import pagemill.engine.layers.library
import transformers.distributed.sharding_utils
from transformers.utils import is_torch_distributed_available

assert is_torch_distributed_available()
assert transformers.distributed.sharding_utils.DTensor
"""

STUBS = {
    "torchao": """
import torch._dynamo.utils  # a replaced package would leave this module without its parent
from torch._dynamo import is_compiling

assert callable(torch._dynamo.utils.dynamo_timed) and callable(torch._dynamo.optimize)

@torch.compiler.disable
def by_function(): ...

@torch._dynamo.disable(recursive=False)
def by_package(): ...
""",
    "bitsandbytes": "import torch._inductor.config\nimport torch._dynamo.config",
    "flash_attn": "import torch\nassert torch._dynamo.allow_in_graph",
}
"""Libraries that transformers imports if they are installed, each with its own use of torch's compiler.

accelerate and peft are installed for the tests.
"""

ANY_SUBMODULE = """
import sys
from importlib.machinery import ModuleSpec

__version__ = "99.0"

def __getattr__(name):
    return type(name, (), {})

class Submodules:
    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith(__name__ + ".") else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = __getattr__

sys.meta_path.append(Submodules())
"""

BESIDE_STUBS = (
    READY.partition("unwanted =")[0]
    + """
import torch, torchao
from transformers.utils import import_utils

for name in sys.argv[2].split():
    assert getattr(import_utils, f"is_{name}_available")(), f"transformers does not see the stub of {name}"
assert torchao.by_function._torchdynamo_disable
assert torchao.by_package._torchdynamo_disable
assert torch._dynamo is sys.modules["torch._dynamo"]
double = torch.compile(lambda x: x + x, backend="eager")
assert double(torch.ones(2)).tolist() == [2.0, 2.0]
"""
)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_llama(directory)
    return directory


def _run(program: str, *arguments: str, **environment: str) -> None:
    done = run_python("-c", program, *arguments, cwd=ROOT, env=os.environ | environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_ready_engine_has_imported_its_own_model_and_no_compiler(tiny_llama: Path) -> None:
    _run(READY, str(tiny_llama))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "environment"), [("imported before", {}), ("torchrun", {"LOCAL_RANK": "0"})]
)
def test_transformers_is_whole_where_somebody_else_uses_it(case: str, environment: dict[str, str]) -> None:
    _run(UNTOUCHED, case, **environment)


def test_model_loads_with_libraries_that_import_the_compiler(tiny_llama: Path, tmp_path: Path) -> None:
    for name, source in STUBS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"{source}\n{ANY_SUBMODULE}")
        info = tmp_path / f"{name}-99.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
    seen = "torchao accelerate peft"  # of the others, transformers also wants a GPU
    _run(BESIDE_STUBS, str(tiny_llama), seen, PYTHONPATH=str(tmp_path))


def test_no_weight_is_made_up_before_it_is_read(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a weight was initialised")

    for name in ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_"):
        monkeypatch.setattr(torch.nn.init, name, refuse)
        monkeypatch.setitem(initialization.TORCH_INIT_FUNCTIONS, name, refuse)
    model = load_model(EngineConfig(model=str(tiny_llama)), CpuBackend())
    assert type(model.module).__name__ == "LlamaForCausalLM"
    assert type(model.module).__module__ == "transformers.models.llama.modeling_llama"
    tensors = [*model.module.parameters(), *model.module.buffers()]
    assert all(tensor.device.type == "cpu" and tensor.isfinite().all() for tensor in tensors)


@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_while_a_model_is_loaded(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, was_enabled: bool, fails: bool
) -> None:
    enabled: list[bool] = []
    build = builder._build_model

    def watch(*arguments: Any) -> Any:
        enabled.append(gc.isenabled())
        if fails:
            raise ModelLoadError("no such weights")
        return build(*arguments)

    monkeypatch.setattr(builder, "_build_model", watch)
    gc.unfreeze()  # objects that earlier tests of this process froze
    if not was_enabled:
        gc.disable()
    try:
        config = EngineConfig(model=str(tiny_llama), skip_tokenizer_init=True, kv_cache_memory_bytes=2**22)
        if fails:
            with pytest.raises(ModelLoadError):
                Engine.from_config(config)
        else:
            Engine.from_config(config).close()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
    assert enabled == [False]
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_a_model_that_is_loaded_later_leaves_the_frozen_heap(tiny_llama: Path) -> None:
    """A worker freezes its heap once; a second engine must not thaw it."""
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        config = EngineConfig(model=str(tiny_llama), skip_tokenizer_init=True, kv_cache_memory_bytes=2**22)
        Engine.from_config(config).close()
        assert 0.9 * frozen < gc.get_freeze_count() <= frozen  # some of it is freed meanwhile
    finally:
        gc.unfreeze()
