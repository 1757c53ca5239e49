"""`python -m tests.prepare`: create once the files that every test process would otherwise create on a clean checkout.

These are the packaged model in the served form, and the machine code of the CPU operators.
"""

from __future__ import annotations

import logging

import torch

from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.llm import LLM
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.sampling_params import SamplingParams


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="    %(message)s")
    if CpuBackend().has_kernels(torch.float32):
        from pagemill.kernels.cpu import operators as cpu

        cpu.warm_up_layers(2, 1, 16, 16)
    llm = LLM(model=str(packaged_model_directory()), device="cpu", kv_cache_memory_bytes=64 << 20)
    llm.generate(
        ["Once upon a time"], SamplingParams(max_tokens=2, temperature=0.8, top_k=5, top_p=0.9, seed=1)
    )


if __name__ == "__main__":
    main()
