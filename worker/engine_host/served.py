"""A loaded engine as another process sees it: its properties, and the part that does not need a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from pagemill.engine.adapters.pool import NoAdapters
from pagemill.engine.config import SchedulerConfig
from pagemill.engine.parts import Tier
from pagemill.engine.text.token_texts import TokenTexts
from pagemill.engine.text.tokenizer import Tokenizer
from pagemill.worker.engine_host.remote_adapters import RemoteAdapters

if TYPE_CHECKING:
    from pagemill.engine.pooling.input_processor import PoolingInputProcessor
    from pagemill.engine.serving import AnyEngine
    from pagemill.engine.text.input_processor import InputProcessor


@dataclass(frozen=True)
class ServedModel:
    """The first message of an engine's process. The receiver reads the tokenizer again from its folder."""

    served_models: tuple[str, ...]
    fingerprint: str
    model_parts: str
    tier: Tier
    limits: SchedulerConfig
    tokenizer: Tokenizer | None
    input_processor: InputProcessor | PoolingInputProcessor
    adapters: RemoteAdapters | NoAdapters

    @classmethod
    def from_engine(cls, engine: AnyEngine) -> ServedModel:
        pool = engine.adapters
        return cls(
            engine.served_models,
            engine.fingerprint,
            engine.model_parts,
            engine.tier,
            engine.limits,
            engine.tokenizer,
            engine.input_processor,
            pool if isinstance(pool, NoAdapters) else RemoteAdapters(pool.registered()),
        )

    lacks: ClassVar[frozenset[str]] = frozenset()

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)
