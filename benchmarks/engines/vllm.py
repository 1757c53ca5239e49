"""vLLM's CPU build, offline: runs in its own environment (`benchmarks.engines.peers`)."""

from __future__ import annotations

import os

from benchmarks import measure

DTYPE = os.environ.get("PAGEMILL_BENCH_VLLM_DTYPE", "float32")


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import torch
    import transformers
    import vllm

    llm = vllm.LLM(
        model=request.model, dtype=DTYPE, max_model_len=request.longest, skip_tokenizer_init=True, seed=0
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in max_tokens
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    versions = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return generate, versions


if __name__ == "__main__":
    # vLLM starts worker processes that import this module again; only the first one measures.
    measure.run(load)
