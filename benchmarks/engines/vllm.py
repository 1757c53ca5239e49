"""vLLM's CPU build, offline, with prefix cache; runs in a separate environment (`benchmarks.engines.peers`).

With `options["choices"]` it labels. Version 0.32.0 occasionally returns a text that is not one of the
choices. Such a row counts as labeled, as NO_CHOICE.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks import measure

DTYPE = os.environ.get("PAGEMILL_BENCH_VLLM_DTYPE", "float32")
NO_CHOICE = -1


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import torch
    import transformers
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    choices: list[str] = request.options.get("choices", [])
    settings: dict[str, Any] = {"enable_prefix_caching": True} if choices else {"skip_tokenizer_init": True}
    llm = vllm.LLM(model=request.model, dtype=DTYPE, max_model_len=request.longest, seed=0, **settings)

    def outputs(prompts: list[list[int]], params: Any) -> list[Any]:
        finished = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in finished]

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in max_tokens
        ]
        return [list(output.token_ids) for output in outputs(prompts, params)]

    def label(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        labels = StructuredOutputsParams(choice=choices)
        params = vllm.SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=labels)
        texts = [output.text for output in outputs(prompts, params)]
        return [[choices.index(text) if text in choices else NO_CHOICE] for text in texts]

    packages = {"vllm": vllm, "torch": torch, "transformers": transformers}
    versions = {name: package.__version__ for name, package in packages.items()}
    return label if choices else generate, versions


if __name__ == "__main__":
    # vLLM starts worker processes that import this module again; only the first one measures.
    measure.run(load)
