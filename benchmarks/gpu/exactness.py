"""A small saved model with weights that tell tokens apart, and its outputs: for sections that compare tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import TINY, Requests, uniform_requests
from benchmarks.gpu.section import Bench


def saved_model(directory: Path) -> Any:
    """A model of transformers with random weights, which is in `directory` too.

    Small and in fp32, where rows of a product may add up in another order but hardly ever change a token.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    TINY.save_config(directory)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)  # wide, so that candidates are rarely close
    model.save_pretrained(directory)
    return model.eval()


def requests_of(bench: Bench) -> Requests:
    count, shortest, longest = (3, 3, 6) if bench.is_tiny else (12, 8, 48)
    return uniform_requests(TINY, count, shortest, longest, seed=0)


def tokens_of(bench: Bench, directory: Path, **options: Any) -> list[list[int]]:
    """Return a saved model's outputs for the requests, every other one greedy; `options` of `EngineConfig`."""
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    requests = requests_of(bench)
    params = [
        SamplingParams(
            temperature=0.9 * (number % 2), top_p=0.9, seed=number, max_tokens=length, ignore_eos=True
        )
        for number, length in enumerate(requests.lengths)
    ]
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 256}
    llm = LLM(str(directory), **(settings | {"num_threads": 1, "device": bench.device.type} | options))
    try:
        results = llm.generate(requests.prompts, params, use_tqdm=False)
    finally:
        llm.close()
    return [result.outputs[0].token_ids for result in results]


def differs_from_transformers(bench: Bench, model: Any, outputs: list[list[int]]) -> int:
    """Count the greedy outputs in which transformers would have chosen another token at any place."""
    requests, count = requests_of(bench), 0
    model = model.to(bench.device)
    with torch.inference_mode():
        for prompt, output in list(zip(requests.prompts, outputs, strict=True))[::2]:
            whole = torch.tensor([prompt + output[:-1]], device=bench.device)
            greedy = model(whole, use_cache=False).logits[0, len(prompt) - 1 :].argmax(dim=-1)
            count += int(greedy.tolist() != output)
    return count
