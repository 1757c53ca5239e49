"""Every supported family, from a checkpoint in its publisher's layout: the greedy output equals the reference's."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.errors import PromptTooLong
from pagemill.engine.llm import LLM
from pagemill.engine.models.families.multimodal import MULTIMODAL
from pagemill.engine.models.families.registry import FAMILIES
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.models.families.mixture_cases import MIXTURE_CASES
from tests.engine.models.families.native_cases import NATIVE_CASES, mpt
from tests.engine.models.families.remote_cases import REMOTE_CASES
from tests.engine.models.families.tiny import NUM_OUTPUT_TOKENS, PROMPTS, VOCAB_SIZE, TinyCheckpoint

CASES = NATIVE_CASES | MIXTURE_CASES | REMOTE_CASES
LAYOUTS = {
    "llama", "gpt2", "bloom", "falcon, as its 7b", "gemma3", "mistral, a window shorter than the prompt", "mixtral",
    "gpt_oss", "baichuan 7b",
}  # fmt: skip
"""One case for each layout of a model: `make test` runs these."""
# Prompts in chunks, half-full blocks, changing rows.
SMALL_STEPS: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4, "max_num_batched_tokens": 5}


def make_llm(directory: Path, checkpoint: TinyCheckpoint, **options: Any) -> LLM:
    """In fp32, regardless of the configuration, since the tensors are fp32."""
    settings = {"num_threads": 1, "dtype": "float32"}
    return LLM(str(directory), **(settings | checkpoint.options | options))


def run(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in LAYOUTS else pytest.mark.slow) for case in CASES]
)
def test_output_equals_the_reference(case: str, tmp_path: Path) -> None:
    checkpoint = CASES[case]()
    checkpoint.write(tmp_path, num_shards=3)
    expected = [checkpoint.complete(prompt) for prompt in PROMPTS]
    assert len({tuple(output) for output in expected}) > 1
    llm = make_llm(tmp_path, checkpoint, **SMALL_STEPS)
    assert run(llm) == expected
    assert run(llm) == expected, "with the prompts in the prefix cache"
    llm.engine.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["baichuan 13b", "gemma2", "internlm2", "mistral, a window shorter than the prompt", "phi3", "smollm3"],
)
def test_output_equals_the_reference_in_transformers_own_modules(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices for which no layer is rewritten: only attention is Pagemill's."""
    monkeypatch.setattr(CpuBackend, "fuse", lambda *_: None)
    checkpoint = CASES[case]()
    checkpoint.write(tmp_path)
    expected = [checkpoint.complete(prompt) for prompt in PROMPTS]
    assert run(make_llm(tmp_path, checkpoint, **SMALL_STEPS)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["baichuan2 13b", "bloom", "falcon, as its 40b", "falcon, as its rw-1b", "gemma3", "gptj", "mpt"]
)
def test_half_precision_stays_close_to_the_reference(case: str, tmp_path: Path) -> None:
    """Slopes, softmax and norms keep their precision: rounded weights change few of the first tokens."""
    checkpoint = CASES[case]()
    checkpoint.write(tmp_path)
    outputs = run(make_llm(tmp_path, checkpoint, dtype="bfloat16", **SMALL_STEPS))
    assert {len(output) for output in outputs} == {NUM_OUTPUT_TOKENS}
    firsts = [
        output[0] == checkpoint.complete(prompt)[0] for output, prompt in zip(outputs, PROMPTS, strict=True)
    ]
    assert sum(firsts) >= len(PROMPTS) - 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bloom", "mpt", "baichuan 13b"])
def test_alibi_reaches_past_the_trained_context(case: str, tmp_path: Path) -> None:
    checkpoint = CASES[case]()
    directory = checkpoint.write(tmp_path)
    prompt = [(7 * i + 3) % VOCAB_SIZE for i in range(140)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    with pytest.raises(PromptTooLong):
        make_llm(directory, checkpoint, num_kv_blocks=64).generate([prompt], params, use_tqdm=False)
    if case == "mpt":  # transformers builds its biases for this many positions
        checkpoint = mpt(max_seq_len=160)
    llm = make_llm(directory, checkpoint, num_kv_blocks=64, max_model_len=160)
    assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == checkpoint.complete(
        prompt
    )


def test_every_model_type_has_a_case() -> None:
    tested = {CASES[case]().config["model_type"] for case in CASES}
    assert tested - MULTIMODAL.keys() == {kind for family in FAMILIES for kind in family.model_types}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_output_does_not_depend_on_the_schedule(case: str, tmp_path: Path) -> None:
    checkpoint = CASES[case]()
    checkpoint.write(tmp_path)
    expected = [checkpoint.complete(prompt) for prompt in PROMPTS]
    for block_size, budget, overlapped in itertools.product((1, 16, 32), (1, 7, 256), (False, True)):
        llm = make_llm(
            tmp_path,
            checkpoint,
            num_kv_blocks=256,
            block_size=block_size,
            max_num_batched_tokens=budget,
            async_scheduling=overlapped,
            pad_to_bucket=overlapped,
        )
        assert run(llm) == expected, (block_size, budget, overlapped)


# Torch's own operators compute between the matmuls: norms, activations and rotations differ by family.
INVARIANT_CASES = (
    "baichuan2 13b", "bloom", "falcon, as its 40b", "gemma2", "glm4_moe", "gpt2", "gpt_oss", "gptj", "mpt",
    "olmoe", "opt", "phi", "phimoe", "qwen3_moe, a dense layer between",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in INVARIANT_CASES else pytest.mark.slow) for case in CASES]
)
def test_batch_invariance_is_bitwise(case: str, tmp_path: Path) -> None:
    checkpoint = CASES[case]()
    checkpoint.write(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=2)

    def score(llm: LLM, prompts: list[list[int]]) -> list[Any]:
        return [result.outputs[0].logprobs for result in llm.generate(prompts, params, use_tqdm=False)]

    options = SMALL_STEPS | {"batch_invariant": True}
    alone = make_llm(tmp_path, checkpoint, **options)
    crowd = make_llm(tmp_path, checkpoint, **(options | {"max_num_batched_tokens": 256}))
    assert [score(alone, [prompt])[0] for prompt in PROMPTS] == score(crowd, PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_quantized_numbers_stay_close_to_the_reference(
    case: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Every family's layers and caches can be quantized; tiny random models are more sensitive than real ones."""
    checkpoint = CASES[case]()
    checkpoint.write(tmp_path)
    outputs = run(make_llm(tmp_path, checkpoint, num_kv_blocks=128, block_size=8, **options))
    firsts = [
        output[0] == checkpoint.complete(prompt)[0] for output, prompt in zip(outputs, PROMPTS, strict=True)
    ]
    assert sum(firsts) >= len(PROMPTS) - 4
