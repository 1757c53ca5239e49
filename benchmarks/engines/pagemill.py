"""Pagemill's engine, offline: `LLM.generate` with all requests submitted together.

With `options["choices"]` it labels: the output of a row is the number of its label.
"""

from __future__ import annotations

from benchmarks import measure


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import torch
    import transformers

    from pagemill.common.structured_outputs import StructuredOutputs
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    options = {"kv_cache_memory_bytes": request.kv_cache_memory_bytes, **request.options}
    choices: list[str] = options.pop("choices", [])
    llm = LLM(model=request.model, skip_tokenizer_init=not choices, **options)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in max_tokens]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    def label(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        labels = StructuredOutputs(choice=tuple(choices))
        params = SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=labels)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[choices.index(output.outputs[0].text)] for output in outputs]

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return label if choices else generate, versions


if __name__ == "__main__":
    measure.run(load)
