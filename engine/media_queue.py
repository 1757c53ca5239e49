"""Requests whose media are encoded before they are scheduled, a few per step, so that decoding continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.device_failure import is_lost_device_error
from pagemill.engine.errors import DeviceLost, EngineError, StepError
from pagemill.engine.media import PromptMedia
from pagemill.engine.outputs import MediaStats
from pagemill.engine.scheduling.request import Request, SequenceStatus

if TYPE_CHECKING:
    from pagemill.engine.execution.media_encoder import MediaEncoder

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    request: Request
    media: PromptMedia
    adapter: Adapter | None
    num_encoded: int = 0


class MediaQueue:
    """Queue that holds a request's vectors from their encoding until its prompt is computed.

    Vectors of earlier requests are not evicted for the next one: it waits until they have been read. A request whose
    vectors alone exceed the cache is encoded when no other request holds vectors.
    """

    def __init__(self, encoder: MediaEncoder, budget: int) -> None:
        """`budget`: placeholders encoded per step, but at least one item."""
        self._encoder, self._budget = encoder, budget
        self._waiting: dict[str, _Waiting] = {}
        self._holding: dict[str, Request] = {}
        """Requests that hold vectors."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def stats(self) -> MediaStats:
        return replace(self._encoder.stats(), waiting=len(self._waiting))

    def add(self, request: Request, adapter: Adapter | None) -> None:
        assert request.media is not None
        self._waiting[request.request_id] = _Waiting(request, request.media, adapter)

    def withdraw(self, request_id: str) -> Request | None:
        """Remove a waiting request."""
        waiting = self._waiting.pop(request_id, None)
        self._release(request_id)
        return None if waiting is None else waiting.request

    def encode(
        self, is_cached: Callable[[Request], bool]
    ) -> Iterator[tuple[Request, Adapter | EngineError | None]]:
        """Encode within the budget; yield requests that are ready, with their adapter, or that failed.

        Args:
            is_cached: returns True for a request whose placeholders are all in the KV cache.
        """
        self._release_read()
        budget = self._budget
        while self._waiting and budget > 0:
            first = min(self._waiting.values(), key=self._order)
            name = first.request.request_id
            if name not in self._holding:
                if is_cached(first.request):
                    self._encoder.count_hits(len(first.media.items))
                    yield from self._end(first, first.adapter)
                    continue
                if not self._hold(first):
                    return
            try:
                while first.num_encoded < len(first.media.items) and budget > 0:
                    budget -= self._encode_next(first)
            except EngineError as error:
                yield from self._end(first, error)
            except Exception as error:
                if is_lost_device_error(error):
                    raise DeviceLost(f"the device is lost: {type(error).__name__}") from error
                logger.exception("request %s fails: its images can't be encoded", name)
                yield from self._end(
                    first, StepError(f"the encoder of images raised {type(error).__name__}", [name])
                )
            else:
                if first.num_encoded == len(first.media.items):
                    yield from self._end(first, first.adapter)

    def _order(self, waiting: _Waiting) -> tuple[bool, int, float]:
        """Return a sort key: requests that hold vectors come first, as others may wait for their space."""
        request = waiting.request
        return request.request_id not in self._holding, request.priority, request.arrival

    def _encode_next(self, waiting: _Waiting) -> int:
        """Encode a request's next item; return the number of encoded placeholders."""
        number = waiting.num_encoded
        item, count = waiting.media.items[number], len(waiting.media.places[number])
        is_there = self._encoder.has(item)
        self._encoder.vectors(item, count)
        waiting.num_encoded += 1
        if is_there:
            self._encoder.count_hits(1)
        return 0 if is_there else count

    def _end(
        self, waiting: _Waiting, outcome: Adapter | EngineError | None
    ) -> Iterator[tuple[Request, Adapter | EngineError | None]]:
        del self._waiting[waiting.request.request_id]
        if isinstance(outcome, EngineError):
            self._release(waiting.request.request_id)
        yield waiting.request, outcome

    def _hold(self, waiting: _Waiting) -> bool:
        """Reserve space for a request's vectors. Return False if others must be read first."""
        if is_held := self._encoder.hold(waiting.media):
            self._holding[waiting.request.request_id] = waiting.request
        return is_held

    def _release_read(self) -> None:
        """Release the vectors of requests whose prompts are computed. A preempted request encodes them again."""
        for name, request in list(self._holding.items()):
            if name not in self._waiting and _has_read(request):
                self._release(name)

    def _release(self, request_id: str) -> None:
        if (request := self._holding.pop(request_id, None)) is not None and request.media is not None:
            self._encoder.release(request.media)


def _has_read(request: Request) -> bool:
    """Return True if a request's vectors are in the KV cache, or not needed."""
    assert request.media is not None
    end = request.media.end
    return request.is_finished or any(
        sequence.status is SequenceStatus.RUNNING and sequence.num_computed_tokens >= end
        for sequence in request.sequences
    )
