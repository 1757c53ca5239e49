"""The parts of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagemill.engine.adapters.pool import NO_ADAPTERS, AdapterPool, NoAdapters
from pagemill.engine.config import SchedulerConfig
from pagemill.engine.outputs import MemoryUse
from pagemill.engine.plan import Executor
from pagemill.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagemill.engine.execution.parallel.rank_processes import RankProcesses

Tier = Literal["bitwise", "token", "continues"]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A loaded model's contribution to an engine: everything the engine needs and does not decide."""

    executor: Executor
    tokenizer: Tokenizer | None
    limits: SchedulerConfig
    served_models: tuple[str, ...]
    """The names that jobs may use, the main one first."""
    vocab_size: int
    fingerprint: str
    tier: Tier
    device: str
    kv_block_bytes: int = 0
    """Bytes of one KV block over all layers; 0 without a device cache."""
    kv_dtype: str = ""
    weight_bytes: int = 0
    model_parts: str = ""
    """How each part of the model runs, as the start logs it; empty without a model."""
    tool_call_parser: str | None = None
    """The settings of these names."""
    reasoning_parser: str | None = None
    adapters: AdapterPool | NoAdapters = NO_ADAPTERS
    ranks: RankProcesses | None = None
    """The other processes of a model spread over several."""

    def memory_bytes(self) -> dict[MemoryUse, int]:
        """Return the device's memory by use; empty without a model."""
        if not self.weight_bytes:
            return {}
        return {"weights": self.weight_bytes, "kv": self.kv_block_bytes * self.limits.num_kv_blocks}
