"""vLLM's CPU build as a labeller, its prefix cache on: runs in its own environment (`benchmarks.engines.peers`).

Version 0.32.0 returns, now and then, a text that is none of the choices: such a row counts as labelled, as NO_CHOICE.
"""

from __future__ import annotations

import os

from benchmarks import measure

NO_CHOICE = -1
DTYPE = os.environ.get("PAGEMILL_BENCH_VLLM_DTYPE", "float32")


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import torch
    import transformers
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    choices: list[str] = request.options["choices"]
    llm = vllm.LLM(
        model=request.model,
        dtype=DTYPE,
        max_model_len=request.longest,
        enable_prefix_caching=True,
        seed=0,
    )
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=16, structured_outputs=StructuredOutputsParams(choice=choices)
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        texts = [output.outputs[0].text for output in outputs]
        return [[choices.index(text) if text in choices else NO_CHOICE] for text in texts]

    versions = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return generate, versions


if __name__ == "__main__":
    measure.run(load)
