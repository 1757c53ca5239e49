"""OpenVINO GenAI's continuous batching, offline; runs in a separate environment (`benchmarks.engines.peers`).

The weights are exported once per model and format, and stored next to the environment. fp32 is enforced: on CPU
OpenVINO would otherwise compute in its fastest precision and store the KV cache in 8 bits.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import measure

FORMAT_VARIABLE = "PAGEMILL_BENCH_OPENVINO_WEIGHTS"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def export(model: str, weight_format: str) -> Path:
    """Return the model in OpenVINO's format."""
    source = Path(model).resolve()
    key = hashlib.sha256(f"{source}:{weight_format}".encode()).hexdigest()[:12]
    target = Path(sys.prefix) / "models" / f"{source.name}-{weight_format}-{key}"
    if not (target / "openvino_model.xml").exists():
        exporter = Path(sys.prefix) / "bin" / "optimum-cli"
        task = ["--task", "text-generation-with-past", "--weight-format", weight_format]
        subprocess.run([exporter, "export", "openvino", "--model", source, *task, target], check=True)
    return target


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    weight_format = os.environ.get(FORMAT_VARIABLE, "fp32")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = max(1, request.kv_cache_memory_bytes // 2**30)
    scheduler.enable_prefix_caching = True
    properties: dict[str, Any] = dict(EXACT) if weight_format == "fp32" else {}
    path = str(export(request.model, weight_format))
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        configs = []
        for count in max_tokens:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
            configs.append(config)
        return [list(result.m_generation_ids[0]) for result in pipeline.generate(inputs, configs)]

    return generate, {"openvino_genai": genai.__version__, "openvino": ov.__version__}


if __name__ == "__main__":
    measure.run(load)
