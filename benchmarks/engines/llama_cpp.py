"""llama.cpp, offline, with sequences decoded in one batch; runs in a separate environment.

All requests start together and leave when they have their tokens, as in llama.cpp's batched programs.
"""

from __future__ import annotations

import os
from itertools import islice

from benchmarks import measure

PROMPT_BATCH = 512


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import llama_cpp
    import numpy as np

    slots: int = request.options["slots"]
    model_options = llama_cpp.llama_model_default_params()
    model_options.n_gpu_layers = 0
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(request.options["file"].encode(), model_options)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = slots * (-(-request.longest // 256) * 256)
    options.n_batch = options.n_ubatch = max(PROMPT_BATCH, slots)
    options.n_seq_max = slots
    options.n_threads = options.n_threads_batch = len(os.sched_getaffinity(0))
    context = llama_cpp.llama_init_from_model(model, options)
    batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
    memory = llama_cpp.llama_get_memory(context)

    def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, wanted) entries; return the most likely token of each wanted entry."""
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed: the context is too small")
        rows = (i for i, entry in enumerate(entries) if entry[3])
        logits = (llama_cpp.llama_get_logits_ith(context, i) for i in rows)
        return [int(np.ctypeslib.as_array(row, (vocab_size,)).argmax()) for row in logits]

    def generate_batch(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        llama_cpp.llama_memory_clear(memory, True)
        entries = (
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        )
        outputs: list[list[int]] = []
        while chunk := list(islice(entries, PROMPT_BATCH)):
            outputs += [[token] for token in decode(chunk)]
        while True:
            running = [s for s, output in enumerate(outputs) if len(output) < max_tokens[s]]
            if not running:
                return outputs
            newest = [(outputs[s][-1], len(prompts[s]) + len(outputs[s]) - 1, s, True) for s in running]
            for s, token in zip(running, decode(newest), strict=True):
                outputs[s].append(token)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), slots):
            part = slice(start, start + slots)
            outputs += generate_batch(prompts[part], max_tokens[part])
        return outputs

    return generate, {"llama-cpp-python": llama_cpp.__version__}


if __name__ == "__main__":
    measure.run(load)
