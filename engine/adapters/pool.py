"""The adapters that requests can name, and those in memory.

Reading a folder takes tens of milliseconds to seconds, so it runs on a separate thread; the engine's thread only
exchanges addresses between two steps. A request whose adapter is not in memory waits outside of the scheduler.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pagemill.common.bounds import ADAPTER_NAME, ADAPTER_NAME_RULE
from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.adapters.names import AdapterNames
from pagemill.engine.errors import AdapterError, EngineError, UnknownAdapter
from pagemill.engine.outputs import AdapterStats

if TYPE_CHECKING:
    from pagemill.engine.adapters.layers import ReadyAdapter

logger = logging.getLogger(__name__)

AGEING_S = 1.0
"""Once a request has waited this long for a slot, later requests queue behind it, even if theirs is in memory."""


class Layers(Protocol):
    """Implemented by `pagemill.engine.adapters.layers.AdaptedLayers`."""

    def read(self, adapter: Adapter) -> ReadyAdapter: ...

    def install(self, slot: int, ready: ReadyAdapter) -> None: ...

    def clear(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    max_adapters: int
    """Names."""
    num_slots: int
    """Adapters in memory."""
    memory_bytes: int
    """Their total bytes."""


@dataclass(slots=True, eq=False)
class _Resident:
    adapter: Adapter
    slot: int
    reading: Future[ReadyAdapter] | None
    """None: it is in its slot."""
    users: set[str] = field(default_factory=set)
    """Requests."""
    used_at: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    request_id: str
    adapter: Adapter
    since: float


class AdapterPool(AdapterNames):
    """Names are for any thread, everything else for the engine's.

    `find` returns a request's adapter, `attach` or later `ready` its slot; `release` frees it when the request ends.
    """

    def __init__(
        self, layers: Layers, limits: AdapterLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._layers, self._limits, self._clock = layers, limits, clock
        self._lock = threading.Lock()
        self._residents: dict[str, _Resident] = {}
        """By digest, so that later weights of a name are a separate entry."""
        self._slot_of: dict[str, _Resident] = {}
        self._free_slots = list(reversed(range(limits.num_slots)))
        self._waiting: list[_Waiting] = []
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="pagemill-adapters")
        self._uses = self._loads = self._evictions = 0
        self._requests: Counter[str] = Counter()

    def add(self, name: str, directory: Path) -> Adapter:
        """Read and check a folder, and register it by name; it replaces one of that name for later requests.

        Raises:
            AdapterError: the folder cannot be used with this model, or the limit of names is reached.
        """
        if not ADAPTER_NAME.fullmatch(name):
            raise AdapterError(f"{name[:100]!r} is not valid: {ADAPTER_NAME_RULE}")
        self._check_room(name)
        given = Adapter(name, directory.expanduser().absolute(), "", 0, 0)
        try:
            adapter = self._layers.read(given).adapter
        except AdapterError as error:
            raise AdapterError(f"adapter {name}: {error}") from error
        if adapter.num_bytes > self._limits.memory_bytes:
            raise AdapterError(
                f"adapter {name}: it takes {adapter.num_bytes:,} bytes, adapter_memory_bytes is "
                f"{self._limits.memory_bytes:,}"
            )
        with self._lock:
            self._check_room(name)
            self._named[name] = adapter
            for gone in self._requests.keys() - self._named.keys():
                del self._requests[gone]
        logger.info("adapter %s: rank %d, %.1f MiB", name, adapter.rank, adapter.num_bytes / 2**20)
        return adapter

    def remove(self, name: str) -> None:
        """Remove a name. Requests with its adapter continue. Raises `UnknownAdapter`."""
        with self._lock:
            if self._named.pop(name, None) is None:
                raise self.unknown(name)

    def attach(self, request_id: str, adapter: Adapter) -> int | None:
        """Return the slot of a request's adapter; None: `ready` will return it."""
        self._requests[adapter.name] += 1
        resident = self._residents.get(adapter.digest)
        if resident is not None and resident.reading is None and not self._is_anyone_aged():
            return self._hold(resident, request_id)
        self._waiting.append(_Waiting(request_id, adapter, self._clock()))
        self._start_reading()
        return None

    def ready(self, timeout_s: float) -> list[tuple[str, int | EngineError]]:
        """Return waiting requests whose adapter is in its slot, or could not be read; wait for the first one."""
        if not self._waiting:
            return []
        reading = [one.reading for one in self._residents.values() if one.reading is not None]
        if reading and timeout_s > 0:
            wait(reading, timeout_s, FIRST_COMPLETED)
        outcomes = self._take_read()
        outcomes += self._serve_waiting()
        self._start_reading()
        return outcomes

    def release(self, request_id: str) -> None:
        """Release a request's slot, or remove it from the waiting requests. An unknown id is ignored."""
        if self._waiting:
            self._waiting = [one for one in self._waiting if one.request_id != request_id]
        resident = self._slot_of.pop(request_id, None)
        if resident is not None:
            resident.users.discard(request_id)

    def __len__(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return any(one.request_id == request_id for one in self._waiting)

    def stats(self) -> AdapterStats:
        named = self._named.copy()
        return AdapterStats(
            named=len(named),
            resident=len(self._residents),
            slots=self._limits.num_slots,
            used_bytes=sum(one.adapter.num_bytes for one in self._residents.values()),
            capacity_bytes=self._limits.memory_bytes,
            waiting=len(self._waiting),
            loads=self._loads,
            evictions=self._evictions,
            requests={name: self._requests[name] for name in named},
        )

    def _check_room(self, name: str) -> None:
        if name not in self._named and len(self._named) >= self._limits.max_adapters:
            raise AdapterError(
                f"adapter {name}: there are {len(self._named)} already, and max_adapters is {self._limits.max_adapters}"
            )

    def _is_anyone_aged(self) -> bool:
        return bool(self._waiting) and self._clock() - self._waiting[0].since > AGEING_S

    def _hold(self, resident: _Resident, request_id: str) -> int:
        self._uses += 1
        resident.used_at = self._uses
        resident.users.add(request_id)
        self._slot_of[request_id] = resident
        return resident.slot

    def _take_read(self) -> list[tuple[str, int | EngineError]]:
        """Install the adapters that have been read; return the requests of those that failed."""
        outcomes: list[tuple[str, int | EngineError]] = []
        for digest, resident in list(self._residents.items()):
            if resident.reading is None or not resident.reading.done():
                continue
            try:
                ready = resident.reading.result()
                if ready.adapter.digest != digest:
                    raise AdapterError("the files have changed since the adapter was added; add it again")
            except Exception as error:
                del self._residents[digest]
                self._free_slots.append(resident.slot)
                name = resident.adapter.name
                failure = EngineError(f"adapter {name} can't be loaded: {error}")
                logger.error("%s", failure)
                # The same weights under another name can be read from the other name's folder.
                outcomes += [
                    (one.request_id, failure) for one in self._waiting if one.adapter == resident.adapter
                ]
                self._waiting = [one for one in self._waiting if one.adapter != resident.adapter]
            else:
                self._layers.install(resident.slot, ready)
                resident.reading = None
                self._loads += 1
        return outcomes

    def _serve_waiting(self) -> list[tuple[str, int | EngineError]]:
        """Assign slots to waiting requests in order; none overtakes one that has waited long."""
        served: list[tuple[str, int | EngineError]] = []
        left: list[_Waiting] = []
        is_blocked = False
        for one in self._waiting:
            resident = self._residents.get(one.adapter.digest)
            if resident is None or resident.reading is not None:
                is_blocked = is_blocked or (resident is None and self._clock() - one.since > AGEING_S)
                left.append(one)
            elif is_blocked:
                left.append(one)
            else:
                served.append((one.request_id, self._hold(resident, one.request_id)))
        self._waiting = left
        return served

    def _start_reading(self) -> None:
        """Read the adapters of waiting requests in order, while memory is available."""
        first: set[str] = set()
        for one in self._waiting:
            digest = one.adapter.digest
            if digest not in self._residents and not self._make_room(one.adapter.num_bytes, first):
                return
            first.add(digest)
            if digest in self._residents:
                continue
            slot = self._free_slots.pop()
            reading = self._reader.submit(self._layers.read, replace(one.adapter))
            self._residents[one.adapter.digest] = _Resident(one.adapter, slot, reading, used_at=self._uses)

    def _make_room(self, num_bytes: int, spared: set[str]) -> bool:
        """Evict the longest unused adapters until a slot and these bytes are free; return False if all are in use.

        Args:
            spared: digests that longer waiting requests need.
        """
        used = sum(one.adapter.num_bytes for one in self._residents.values())
        unused = [
            one
            for one in self._residents.values()
            if not one.users and one.reading is None and one.adapter.digest not in spared
        ]
        victims: list[_Resident] = []
        for victim in sorted(unused, key=lambda one: one.used_at):
            if len(self._free_slots) + len(victims) > 0 and used + num_bytes <= self._limits.memory_bytes:
                break
            victims.append(victim)
            used -= victim.adapter.num_bytes
        if not len(self._free_slots) + len(victims) or used + num_bytes > self._limits.memory_bytes:
            return False
        for victim in victims:
            self._layers.clear(victim.slot)
            del self._residents[victim.adapter.digest]
            self._free_slots.append(victim.slot)
            self._evictions += 1
        return True


class NoAdapters:
    """Replaces a pool in an engine without adapters."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def add(self, name: str, directory: Path) -> Adapter:
        raise AdapterError(f"adapter {name}: {self._reason}")

    def remove(self, name: str) -> None:
        raise UnknownAdapter(f"unknown adapter {name!r}: {self._reason}")

    def find(self, name: str) -> Adapter:
        raise UnknownAdapter(f"unknown adapter {name!r}: {self._reason}")

    def registered(self) -> list[Adapter]:
        return []

    def attach(self, request_id: str, adapter: Adapter) -> int | None:
        raise UnknownAdapter(f"unknown adapter {adapter.name!r}: {self._reason}")

    def ready(self, timeout_s: float) -> list[tuple[str, int | EngineError]]:
        return []

    def release(self, request_id: str) -> None:
        pass

    def stats(self) -> AdapterStats:
        return AdapterStats()


NO_ADAPTERS = NoAdapters("this model takes none")
