"""Our engine as a labeller: the output of every row is one of `options["choices"]`, answered as its number."""

from __future__ import annotations

from benchmarks import measure


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import torch
    import transformers

    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams
    from pagemill.structured_outputs import StructuredOutputs

    options = dict(request.options)
    choices: list[str] = options.pop("choices")
    llm = LLM(model=request.model, kv_cache_memory_bytes=request.kv_cache_memory_bytes, **options)
    params = SamplingParams(
        temperature=0.0, max_tokens=16, structured_outputs=StructuredOutputs(choice=tuple(choices))
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[choices.index(output.outputs[0].text)] for output in outputs]

    return generate, {"torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    measure.run(load)
