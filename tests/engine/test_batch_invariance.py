"""`batch_invariant=True`: a request's log probabilities are bit-identical in any batch and schedule."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.devices import cpu
from pagemill.engine.errors import ConfigError
from pagemill.engine.llm import LLM
from pagemill.engine.outputs import SampleState
from pagemill.engine.sampling_params import SamplingParams
from tests.kernels.cpu.test_bf16_matmul import needs_native as needs_bf16

SMALL: dict[str, Any] = {"vocab_size": 301, "bos_token_id": 0, "eos_token_id": 0}
LLAMA: dict[str, Any] = {
    **SMALL, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA},
    "mistral with a window": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], **LLAMA, "sliding_window": 20,
    },
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **LLAMA, "head_dim": 24},
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **SMALL,
        "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 512,
    },
    "gpt_neox": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **LLAMA, "num_key_value_heads": 6,
    },
}  # fmt: skip
# Around the block size and the kernels' tile; the last three share a prefix of two blocks.
LENGTHS = [1, 2, 17, 64, 33, 40, 90]
NUM_OUTPUT_TOKENS = 6

Bits = list[tuple[int, float, tuple[tuple[int, float], ...]]]


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(name: str) -> str:
        path: Path = tmp_path_factory.mktemp("model")
        (path / "config.json").write_text(json.dumps(MODELS[name]))
        return str(path)

    return make


def make_llm(model: str, **options: Any) -> LLM:
    defaults = {"num_kv_blocks": 200, "batch_invariant": True}
    return LLM(model, load_format="dummy", seed=1, skip_tokenizer_init=True, **{**defaults, **options})


def make_prompts() -> list[list[int]]:
    rng = random.Random(7)
    prompts = [[rng.randrange(1, 301) for _ in range(length)] for length in LENGTHS]
    for prompt in prompts[-3:]:
        prompt[:32] = prompts[-1][:32]
    return prompts


def params(**options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True, "logprobs": 4, **options}
    )


def bits_of(result: Any) -> Bits:
    logprobs = result.outputs[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == NUM_OUTPUT_TOKENS
    return [(entry.token_id, entry.logprob, tuple(entry.top)) for entry in logprobs]


def generate(llm: LLM, prompts: list[list[int]], **options: Any) -> list[Bits]:
    return [bits_of(result) for result in llm.generate(prompts, params(**options), use_tqdm=False)]


def generate_alone(llm: LLM, prompts: list[list[int]], **options: Any) -> list[Bits]:
    return [generate(llm, [prompt], **options)[0] for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [name if name in ("llama", "gpt2") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_alone_in_a_crowd_in_chunks_and_preempted(model: str, directory: Any) -> None:
    """Alone without a prefix cache, so that every prompt is computed completely; with it afterwards, and evicting."""
    path, prompts = directory(model), make_prompts()
    plain = make_llm(path, enable_prefix_caching=False)
    alone = generate_alone(plain, prompts)
    assert plain.engine.stats().loaded.tier == "bitwise"
    assert generate(plain, prompts) == alone
    assert generate(make_llm(path, max_num_batched_tokens=13), prompts) == alone
    cached = make_llm(path, max_num_seqs=3)
    assert generate(cached, prompts) == alone
    assert generate(cached, list(reversed(prompts))) == list(reversed(alone))
    assert cached.engine.stats().kv.prefix_hit_tokens > 0
    tight = make_llm(path, num_kv_blocks=28, block_size=4)
    assert generate(tight, prompts) == alone
    # The maximum use of a request with a window is counted at admission.
    assert (tight.engine.stats().scheduler.preemptions > 0) is ("window" not in model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8", "quantization": "int8"}],
    ids=str,
)
def test_quantized_as_well(options: dict[str, Any], directory: Any) -> None:
    path, prompts = directory("llama"), make_prompts()
    alone = generate_alone(make_llm(path, enable_prefix_caching=False, **options), prompts)
    assert generate(make_llm(path, max_num_batched_tokens=13, **options), prompts) == alone


@pytest.mark.slow
@needs_bf16
@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_bfloat16_products_as_well(model: str, directory: Any) -> None:
    path, prompts, options = directory(model), make_prompts(), {"dtype": "bfloat16"}
    plain = make_llm(path, enable_prefix_caching=False, **options)
    assert (plain.engine.stats().loaded.tier, plain.engine.stats().kv.dtype) == ("bitwise", "bfloat16")
    alone = generate_alone(plain, prompts)
    assert generate(make_llm(path, max_num_batched_tokens=13, **options), prompts) == alone
    assert generate(make_llm(path, num_kv_blocks=28, block_size=4, **options), prompts) == alone


@pytest.mark.slow
def test_sampled_tokens_as_well(directory: Any) -> None:
    path, prompts = directory("llama"), make_prompts()
    options = {"temperature": 1.0, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.2}
    alone = generate_alone(make_llm(path), prompts, **options)
    assert generate(make_llm(path, max_num_batched_tokens=29), prompts, **options) == alone


@pytest.mark.slow
def test_resumed(directory: Any) -> None:
    """Tokens of a decode step are computed again as part of a prompt."""
    path, prompts = directory("llama"), make_prompts()
    llm = make_llm(path)
    for number, (prompt, whole) in enumerate(zip(prompts, generate(llm, prompts), strict=True)):
        cut = 1 + number % (NUM_OUTPUT_TOKENS - 1)
        state = SampleState(0, [token for token, _, _ in whole[:cut]])
        fresh = make_llm(path).engine
        token_ids, prepared = fresh.input_processor.process(prompt_token_ids=prompt, params=params())
        fresh.add_request("resumed", token_ids, prepared, resume=[state])
        rest: Bits = []
        while fresh.has_unfinished():
            for output in fresh.step():
                for delta in output.deltas:
                    rest += [(e.token_id, e.logprob, tuple(e.top)) for e in delta.logprobs or []]
        assert rest == whole[cut:]


@pytest.mark.slow
def test_without_it_the_schedule_shows(directory: Any) -> None:
    """The tests above can fail: the kernel for single tokens adds in another order than the one for prompts."""
    path, prompts = directory("llama"), [make_prompts()[-1]]
    options = {"batch_invariant": False, "enable_prefix_caching": False}
    llm = make_llm(path, **options)
    assert llm.engine.stats().loaded.tier == "token"
    assert generate(make_llm(path, max_num_batched_tokens=1, **options), prompts) != generate(llm, prompts)
    invariant = make_llm(path, max_num_batched_tokens=1, enable_prefix_caching=False)
    assert generate(invariant, prompts) == generate(make_llm(path), prompts)


def test_it_is_refused_where_it_cannot_hold(directory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_has_own_products", lambda: False)
    with pytest.raises(ConfigError, match="batch_invariant"):
        make_llm(directory("llama"), dtype="float16")
