"""End to end for `benchmarks.gpu`: an engine over a real model's shapes with dummy weights, in a process of its own.

    python -m benchmarks.gpu.engine JOB.json

A job names a model, an engine and a workload; the answer is one JSON object on the last line of the output. Weights
are drawn on the device and prompts are token ids, so nothing comes from outside.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

Row = dict[str, Any]

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
       "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0,
       "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": False},
    "qwen3-0.6b": _QWEN
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
       "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1000000.0,
       "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    "tiny": _QWEN
    | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
       "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "rope_theta": 10000.0,
       "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "tie_word_embeddings": True},
}  # fmt: skip
_FIRST_TOKEN_IDS = 10_000


@dataclass(frozen=True)
class Job:
    """The engines that one process runs."""

    model: str
    engine: str
    """pagemill, transformers; or switches, ranks: the engine's own variants against each other."""
    device: str
    num_requests: int = 256
    shortest: int = 100
    longest: int = 1024
    seconds: float = 90.0
    """After this long transformers is stopped."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `EngineConfig`."""


def run_in_process(job: Job, timeout_s: float, log: Path) -> Row:
    """The answer of a process of its own, whose failure is a row and not ours; `log` gets its stderr."""
    with tempfile.TemporaryDirectory() as directory, log.open("w+") as stderr:
        path = Path(directory) / "job.json"
        path.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "benchmarks.gpu.engine", str(path)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        )
        try:
            stdout, _ = process.communicate(timeout=max(1.0, timeout_s))
        except subprocess.TimeoutExpired:
            return {"error": f"no answer after {timeout_s:.0f} s | {_last_lines(stderr)}"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
            process.wait()
        if process.returncode != 0:
            return {"error": f"exit code {process.returncode} | {_last_lines(stderr)}"}
    answer: Row = json.loads(stdout.strip().splitlines()[-1])
    return answer


def _last_lines(file: TextIO) -> str:
    file.seek(0)
    return " | ".join(file.read().strip().splitlines()[-4:])


def workload(job: Job) -> tuple[list[list[int]], list[int]]:
    """(prompts, output lengths), uniform between the job's bounds: those of nano-vllm's benchmark, by its seed."""
    draw = random.Random(0)
    most = min(_FIRST_TOKEN_IDS, MODELS[job.model]["vocab_size"] - 1)
    prompts = [
        [draw.randint(0, most) for _ in range(draw.randint(job.shortest, job.longest))]
        for _ in range(job.num_requests)
    ]
    return prompts, [draw.randint(job.shortest, job.longest) for _ in prompts]


def save_config(model: str, directory: Path) -> str:
    (directory / "config.json").write_text(json.dumps(MODELS[model] | {"torch_dtype": "bfloat16"}))
    return str(directory)


def floor_seconds(
    model: str, prompts: list[list[int]], lengths: list[int], ceilings: dict[str, float]
) -> float:
    """The least time that the workload can take: products at the measured rate, then the bytes of every decode step.

    The prompts' products and causal attention; then a step per output token of the longest request, each reading
    the weights once; and every token's keys and values. Prompts and decodes one after the other.
    """
    config = MODELS[model]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    query_width = config["num_attention_heads"] * config["head_dim"]
    per_layer = config["hidden_size"] * (2 * query_width + 2 * kv_width + 3 * config["intermediate_size"])
    head = config["hidden_size"] * config["vocab_size"]
    layers = config["num_hidden_layers"]
    prompt_tokens = sum(map(len, prompts))
    attended = sum(len(prompt) ** 2 / 2 for prompt in prompts)
    operations = 2 * prompt_tokens * per_layer * layers + 4 * attended * query_width * layers
    weight_bytes = 2 * (per_layer * layers + head)
    kv_bytes_per_token = 2 * 2 * kv_width * layers
    reads = sum(
        len(prompt) * length + length * (length - 1) / 2
        for prompt, length in zip(prompts, lengths, strict=True)
    )
    decode_bytes = (max(lengths) - 1) * weight_bytes + reads * kv_bytes_per_token
    return operations / (ceilings["bf16_tflop_per_s"] * 1e12) + decode_bytes / (
        ceilings["copy_gb_per_s"] * 1e9
    )


def _freeze_heap() -> None:
    """As a worker does once its model is there: otherwise full collections stop an engine for tenths of a second."""
    gc.collect()
    gc.freeze()


def run_pagemill(job: Job, directory: Path) -> Row:
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    prompts, lengths = workload(job)
    settings: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True}
    settings |= {"max_model_len": 2 * job.longest, "max_num_seqs": job.num_requests, "device": job.device}
    started = time.perf_counter()
    llm = LLM(save_config(job.model, directory), **(settings | job.options))
    # Kernels are compiled before the clock runs, as in a worker that has warmed up.
    warm = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=4, seed=1)] * 2
    llm.generate([[1] * job.shortest, [2] * job.longest], warm, use_tqdm=False)
    _freeze_heap()
    ready = time.perf_counter()
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length, seed=number)
        for number, length in enumerate(lengths)
    ]
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - ready
    output_tokens = sum(len(result.outputs[0].token_ids) for result in results)
    assert output_tokens == sum(lengths), f"{output_tokens} tokens of {sum(lengths)}"
    stats = llm.engine.stats()
    return _row(job, seconds, output_tokens, ready - started) | {"steps": stats.steps.finished}


def _row(job: Job, seconds: float, output_tokens: int, start_seconds: float) -> Row:
    return {
        "engine": job.engine,
        "requests": job.num_requests,
        "output_tokens": output_tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(output_tokens / seconds, 1),
        "start_s": round(start_seconds, 1),
    }


def run_transformers(job: Job, directory: Path) -> Row:
    """transformers' continuous batching over the same requests, what has ended by the time limit."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    prompts, lengths = workload(job)
    started = time.perf_counter()
    config = AutoConfig.from_pretrained(save_config(job.model, directory))
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    settings = GenerationConfig(do_sample=False, max_new_tokens=4, eos_token_id=-1, pad_token_id=0)
    # A GPU's memory it divides up by itself; of a CPU's it would take nearly all that the machine has.
    room = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if job.device == "cpu" else None
    manager = model.init_continuous_batching(generation_config=settings, continuous_batching_config=room)
    manager.start()
    manager.add_request(prompts[0], max_new_tokens=4)
    while manager.get_result(timeout=1.0) is None:
        if not manager.is_running():
            raise RuntimeError("transformers' generation thread has ended")
    _freeze_heap()
    ready = time.perf_counter()
    for prompt, length in zip(prompts, lengths, strict=True):
        manager.add_request(prompt, max_new_tokens=length)
    ended: list[int] = []
    while len(ended) < len(prompts) and time.perf_counter() < ready + job.seconds and manager.is_running():
        output = manager.get_result(timeout=1.0)
        if output is not None:
            ended.append(len(output.generated_tokens))
    seconds = time.perf_counter() - ready
    return _row(job, seconds, sum(ended), ready - started) | {"ended": len(ended)}


def _saved_model(job: Job, directory: Path) -> Any:
    """A model with random weights, and in `directory`.

    Small and in fp32, where rows of a product may add up in another order but hardly ever change a token.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    save_config(job.model, directory)
    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)  # wide, so that candidates are rarely close
    model.save_pretrained(directory)
    return model


def _tokens(job: Job, directory: Path, **options: Any) -> list[list[int]]:
    """Return a saved model's outputs for the workload, every other request greedy; `options` of `EngineConfig`."""
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    prompts, lengths = workload(job)
    params = [
        SamplingParams(
            temperature=0.9 * (number % 2), top_p=0.9, seed=number, max_tokens=length, ignore_eos=True
        )
        for number, length in enumerate(lengths)
    ]
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 256, "num_threads": 1}
    llm = LLM(str(directory), **(settings | {"device": job.device} | job.options | options))
    try:
        results = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.close()
    return [result.outputs[0].token_ids for result in results]


def run_switches(job: Job, directory: Path) -> Row:
    """Tokens with overlap, graphs and one copy per step on and off, against transformers' own greedy choice."""
    import torch

    model = _saved_model(job, directory)
    prompts, _lengths = workload(job)
    tokens = partial(_tokens, job, directory)
    off = {"enforce_eager": True, "async_scheduling": False, "stage_inputs": False}
    plain = tokens(**off)
    row: Row = {"engine": "pagemill", "requests": len(prompts)}
    for name in ("enforce_eager", "async_scheduling", "stage_inputs"):
        row[name] = sum(a != b for a, b in zip(plain, tokens(**(off | {name: not off[name]})), strict=True))
    row["all"] = sum(a != b for a, b in zip(plain, tokens(), strict=True))
    model = model.to(job.device)
    row["transformers"] = 0
    with torch.inference_mode():
        for prompt, output in list(zip(prompts, plain, strict=True))[::2]:
            whole = torch.tensor([prompt + output[:-1]], device=job.device)
            greedy = model(whole, use_cache=False).logits[0, len(prompt) - 1 :].argmax(dim=-1)
            row["transformers"] += int(greedy.tolist() != output)
    return row | {"ok": all(row[name] == 0 for name in (*off, "all", "transformers"))}


def run_ranks(job: Job, directory: Path) -> Row:
    """Count the requests that differ with the model spread over two devices: none should."""
    _saved_model(job, directory)
    whole = _tokens(job, directory)
    row: Row = {"engine": "pagemill", "requests": len(whole)}
    for name, options in (("2 ranks", {}), ("2 ranks, no overlap", {"async_scheduling": False})):
        spread = _tokens(job, directory, tensor_parallel_size=2, **options)
        row[name] = sum(a != b for a, b in zip(whole, spread, strict=True))
    return row | {"ok": row["2 ranks"] == row["2 ranks, no overlap"] == 0}


_ENGINES = {
    "pagemill": run_pagemill,
    "transformers": run_transformers,
    "switches": run_switches,
    "ranks": run_ranks,
}


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    with tempfile.TemporaryDirectory() as directory:
        row = _ENGINES[job.engine](job, Path(directory))
    print(json.dumps(row), flush=True)
    # transformers' thread may still be at work on requests that nobody waits for.
    os._exit(0)


if __name__ == "__main__":
    main()
