"""Pagemill's own engine, offline: `LLM.generate` with everything submitted at once."""

from __future__ import annotations

from benchmarks import measure


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import torch
    import transformers

    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    options = {"kv_cache_memory_bytes": request.kv_cache_memory_bytes, **request.options}
    llm = LLM(model=request.model, skip_tokenizer_init=True, **options)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in max_tokens]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    return generate, {"torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    measure.run(load)
