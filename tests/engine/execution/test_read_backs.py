"""A step's results reach the host in one copy that the launch starts, and no other tensor is copied meanwhile.

On CUDA a read of a device tensor waits for all queued work, including the next step. Here the device is torch's "meta":
its tensors do not hold data, so any read outside that copy raises.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagemill.engine.builder import EngineParts, _build_model
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices import registry
from pagemill.engine.devices.backend import DeviceEvent, HostCopy, Reached, packed, unpacked
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.llm import LLM
from pagemill.engine.plan import NewRow, RowWork, Sample, StepPlan
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels import dispatch
from tests.engine.tiny_model import save_tiny_llama

LENGTH = 10
VOCAB_SIZE = 512


class MetaCuda(CudaBackend):
    """CUDA's choices, on tensors without data."""

    device = torch.device("meta")
    is_apart = rehearses = False  # pinned memory needs a GPU

    def __init__(self) -> None:
        self.num_copies = 0

    def check(self, config: EngineConfig, dtype: torch.dtype) -> None:
        pass

    def total_bytes(self) -> int:
        return 2**30

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        self.num_copies += 1
        return HostCopy(unpacked(torch.zeros(packed(tensors).shape, dtype=torch.uint8), tensors))

    def mark(self) -> DeviceEvent:
        return Reached()


class Crossings(TorchDispatchMode):
    """Counts the host's tensors that are copied to the device, except one staged copy per step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        leaves = [leaf for leaf in (result, *args) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        if {"cpu", "meta"} <= {leaf.device.type for leaf in leaves}:
            self.seen[str(operator)] += 1
        return result


class Kernels:
    """The shapes of the kernels' results."""

    def reshape_and_cache(self, *_: Any) -> None: ...

    def paged_attention(self, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query.new_empty(query.shape)

    def rms_norm(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x.new_empty(x.shape)

    def add_rms_norm(self, x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty(x.shape), x.new_empty(x.shape)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)

    def rotary_and_cache(self, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query.new_empty(query.shape)

    def sample_tokens(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return logits.new_empty(len(logits), dtype=torch.int64)


@pytest.fixture(scope="module")
def device() -> MetaCuda:
    return MetaCuda()


@pytest.fixture(scope="module")
def parts(device: MetaCuda, tmp_path_factory: pytest.TempPathFactory) -> EngineParts:
    directory = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    settings = EngineConfig(
        model=str(directory), load_format="dummy", skip_tokenizer_init=True, verify=False, dtype="bfloat16",
        num_kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=512, enforce_eager=True, stage_inputs=True,
    )  # fmt: skip
    return _build_model(device, settings, None)


def _step(*works: RowWork, samples: Sequence[Sample] = (), **params: Any) -> StepPlan:
    given = SamplingParams(**({"temperature": 0.9} | params))
    new_rows = [
        NewRow(work.row, "r", 0, [5] * work.num_tokens, work.num_tokens, [1] * 32, given, seed=7)
        for work in works
    ]
    return StepPlan(1, new_rows=new_rows, work=list(works), samples=list(samples))


_PROMPT, _LAST = RowWork(0, 0, LENGTH), Sample(0, LENGTH - 1, LENGTH)
_MANY = tuple((place, (4, 5, 6)) for place in range(200))
STEPS: dict[str, Callable[[], StepPlan]] = {
    "plain": lambda: _step(_PROMPT, samples=[_LAST]),
    "logprobs": lambda: _step(_PROMPT, samples=[_LAST], logprobs=3),
    "greedy logprobs": lambda: _step(_PROMPT, samples=[_LAST], temperature=0.0, logprobs=0),
    "beams": lambda: _step(_PROMPT, samples=[Sample(0, LENGTH - 1, LENGTH, num_candidates=4)]),
    "labels": lambda: _step(RowWork(0, 0, LENGTH, reads=((LENGTH - 1, (4, 5, 6)),)), samples=[_LAST]),
    "scores": lambda: _step(
        RowWork(0, 0, 200, reads=_MANY), RowWork(1, 0, 3, reads=((0, (9,)), (2, (8, 7)))), RowWork(2, 0, 1)
    ),
    "prompt logprobs": lambda: _step(RowWork(0, 0, 200, num_prompt_logprobs=2), samples=[Sample(0, 199, 200)]),
    "all": lambda: _step(
        RowWork(0, 0, 150, num_prompt_logprobs=2),
        RowWork(1, 0, LENGTH, reads=((LENGTH - 1, (4, 5, 6)),)),
        samples=[Sample(0, 149, 150), Sample(1, 159, LENGTH, num_candidates=4)],
        logprobs=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STEPS)
def test_results_reach_the_host_in_one_copy(
    kind: str, parts: EngineParts, device: MetaCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_load", lambda _: _operators(Kernels()))
    make_tensor = torch.tensor

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make_tensor(*args, **kwargs)
        assert made.device.type == "cpu", "a copy from pageable memory waits for the device"
        return made

    monkeypatch.setattr(torch, "tensor", tensor)  # not seen by `Crossings`: "meta" has no data to copy
    runner: Any = parts.executor
    plan, before = STEPS[kind](), device.num_copies
    with Crossings() as crossings:
        step = runner.launch(plan)
        assert device.num_copies == before + 1, "the launch starts the copy"
        result = step.wait()
    assert crossings.seen == {"aten.copy_.default": 1}, "the staged inputs alone cross"
    assert device.num_copies == before + 1
    assert len(result.token_ids) == len(plan.samples)
    for index, work in enumerate(plan.work):
        assert [len(values) for values in result.reads.get(index, [])] == [len(ids) for _, ids in work.reads]
        if work.num_prompt_logprobs is not None:
            assert len(result.prompt_logprobs[index]) == work.num_tokens - 1


def _operators(kernels: Kernels) -> dict[str, Any]:
    return {name: getattr(kernels, name) for name in vars(Kernels) if not name.startswith("_")}


def test_packed_tensors_keep_their_values_shapes_and_dtypes() -> None:
    tensors = [
        torch.tensor([True, False, True]),
        torch.randn(3, 5)[:, ::2],
        torch.zeros(4, 0),
        torch.arange(12).view(3, 4).T,
        torch.tensor([1, 255], dtype=torch.uint8),
        torch.randn(7, dtype=torch.float64),
        torch.randn(5).bfloat16(),
    ]
    copies = unpacked(packed(tensors), tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)
        assert tensor.dtype == copy.dtype


class PackingCpu(CpuBackend):
    """Copies to the host as CUDA does: changes of a tensor after its launch must not have an effect."""

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        return HostCopy(unpacked(packed(tensors).clone(), tensors))


def test_packing_changes_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_llama(tmp_path)
    prompts = [[1, 2, 4, 5, 6], list(range(8, 40)), [9], [20, 21, 22]]
    params = [
        SamplingParams(temperature=0.9, seed=5, max_tokens=6, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=3),
        SamplingParams(temperature=0.0, max_tokens=5, n=2, beam_width=3),
        SamplingParams(temperature=0.7, seed=8, max_tokens=7),
    ]

    def outputs() -> list[Any]:
        llm = LLM(str(tmp_path), skip_tokenizer_init=True, num_kv_blocks=64, num_threads=1, stage_inputs=True)
        results = llm.generate(prompts, params, use_tqdm=False)
        return [
            ([(out.token_ids, out.logprobs) for out in result.outputs], result.prompt_logprobs)
            for result in results
        ]

    plain = outputs()
    monkeypatch.setattr(registry, "find_device", lambda name: PackingCpu())
    assert outputs() == plain
    assert plain[0][0][0][1] is not None
    assert plain[1][1] is not None
