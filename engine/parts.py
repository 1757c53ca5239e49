"""The parts of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagemill.engine.adapters.pool import NO_ADAPTERS, AdapterPool, NoAdapters
from pagemill.engine.config import SchedulerConfig
from pagemill.engine.outputs import MemoryUse
from pagemill.engine.plan import Executor
from pagemill.engine.text.input_processor import InputProcessor
from pagemill.engine.text.pictures import ImageReader
from pagemill.engine.text.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from pagemill.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagemill.engine.execution.media_encoder import MediaEncoder
    from pagemill.engine.execution.parallel.rank_processes import RankProcesses

Tier = Literal["bitwise", "token", "continues"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """The parts of a loaded model that every engine needs."""

    tokenizer: Tokenizer | None
    limits: SchedulerConfig
    served_models: tuple[str, ...]
    """The names that jobs may use, the main one first."""
    fingerprint: str
    tier: Tier
    device: str
    weight_bytes: int = 0
    media_refusal: str = "the model does not read images"
    """Why requests with media are rejected."""
    model_parts: str = ""
    """How each part of the model runs, as logged at startup; empty without a model."""
    replaced_kernels: int = 0
    """Operators computed by plain torch because their kernels failed the check at startup."""
    has_lost_graphs: bool = False
    """True if CUDA graphs could not be captured."""
    adapters: AdapterPool | NoAdapters = NO_ADAPTERS
    ranks: RankProcesses | None = None
    """The other processes of a model spread over several."""

    def memory_bytes(self) -> dict[MemoryUse, int]:
        """Return the device's memory by use; empty without a model."""
        return {"weights": self.weight_bytes} if self.weight_bytes else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts(ModelParts):
    """All parts of a loaded model that an engine needs."""

    executor: Executor
    vocab_size: int
    kv_block_bytes: int = 0
    """Bytes of one KV block over all layers; 0 without a device cache."""
    kv_dtype: str = ""
    encoder: MediaEncoder | None = None
    """Encodes the media of prompts. None: see `media_refusal`."""
    tool_call_parser: str | None = None
    """The settings of these names."""
    reasoning_parser: str | None = None
    defaults: SamplingDefaults = NO_DEFAULTS
    """Sampling parameters of requests that do not set them."""
    images: ImageReader | None = None
    """Prepares the images of prompts. None: see `media_refusal`."""
    inputs: type[InputProcessor] = InputProcessor
    """Prepares requests."""

    def memory_bytes(self) -> dict[MemoryUse, int]:
        """Return the device's memory by use; empty without a model."""
        if not self.weight_bytes:
            return {}
        states = self.limits.state_bytes * self.limits.max_num_seqs
        return {"weights": self.weight_bytes, "kv": self.kv_block_bytes * self.limits.num_kv_blocks + states}
