"""A cache bounded by the bytes of its entries, not their number."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """An LRU cache with a limit in bytes. Thread-safe."""

    def __init__(self, max_bytes: int, size_of: Callable[[K, V], int]) -> None:
        """`size_of` returns the bytes of a key and its value together, including objects that only they reference."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._size_of = size_of
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V) -> None:
        """Store a value and evict the least recently used. One that would not fit alone is not stored."""
        size = self._size_of(key, value)
        with self._lock:
            if key in self._entries:
                self.num_bytes -= self._entries.pop(key)[1]
            if size > self.max_bytes:
                return
            self._entries[key] = (value, size)
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                _, (_, dropped) = self._entries.popitem(last=False)
                self.num_bytes -= dropped


def text_bytes(texts: Iterable[str]) -> int:
    """Return the size of texts in bytes, including a tuple entry for each."""
    return sum(sys.getsizeof(text) + 8 for text in texts)
