"""The host tier of the prefix cache: blocks in host memory, found by key like cached blocks of the pool.

A block that the pool evicts is stored under its hash. The last blocks of a preempted sequence do not have a hash yet
and are stored under the sequence's own key. Both return by key, into new device blocks.

A plan contains the copies and applies them before any other write: first those to the host, then those back. A
device block can therefore be reused by another sequence in the same step that copies it out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Set

from pagemill.engine.scheduling.blocks import HostBlock


class HostTier:
    """Maps keys to host blocks, evicts the least recently used, and collects the copies of the next plan."""

    def __init__(self, num_blocks: int, max_copies: int) -> None:
        """Create an empty tier.

        Args:
            max_copies: blocks that a plan copies to the host; others that are evicted in that step are lost.
        """
        self.capacity = num_blocks
        self.stored = 0
        self.loaded = 0
        self.evictions = 0
        self.skipped = 0
        """Blocks that were not stored, because of `max_copies` or because a full tier was in use."""
        self._max_copies = max_copies
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: dict[Hashable, HostBlock] = {}
        """Least recently used first."""
        self._in_use: set[HostBlock] = set()
        """Blocks that the next plan reads or writes; not evicted before the plan is complete."""
        self._stores: dict[HostBlock, int] = {}
        """Host block -> the device block that the next plan copies to it."""
        self._loads: list[tuple[int, int]] = []
        """(host, device) ids that the next plan copies back."""
        self._discarded: list[int] = []
        """Host ids that become free once the next plan, which may read them, is made."""

    @property
    def num_used(self) -> int:
        return len(self._blocks)

    @property
    def has_load_capacity(self) -> bool:
        """Whether the next plan can load more. One sequence's blocks may exceed the limit."""
        return len(self._loads) < self._max_copies

    def outgoing_blocks(self) -> list[int]:
        """Return the device blocks that the next plan copies; they may already be free."""
        return list(self._stores.values())

    def lookup(self, key: Hashable) -> HostBlock | None:
        return self._blocks.get(key)

    def store(self, key: Hashable, device_id: int) -> None:
        """Store a device block's contents, if there is capacity."""
        if (known := self._blocks.get(key)) is not None:
            self.use([known])
        elif len(self._stores) < self._max_copies and (host_id := self._take()) is not None:
            host = self._blocks[key] = HostBlock(host_id, key)
            self._in_use.add(host)
            self._stores[host] = device_id
            self.stored += 1
        else:
            self.skipped += 1

    def use(self, hosts: Iterable[HostBlock]) -> None:
        """Mark blocks as recently used, and exclude them from eviction until the next plan is complete."""
        for host in hosts:
            self._blocks[host.key] = self._blocks.pop(host.key)
            self._in_use.add(host)

    def load(self, host: HostBlock, device_id: int) -> None:
        """Copy a block in use to the device, where it stays available in both places."""
        self._loads.append((host.host_id, device_id))
        self.loaded += 1

    def discard(self, key: Hashable) -> None:
        """Remove a block, if it is stored."""
        if (host := self._blocks.pop(key, None)) is not None:
            # Keep a store that is not in a plan yet: a load may be queued behind it. The id is free after both.
            self._discarded.append(host.host_id)

    def drop_unproven(self, step_id: int) -> None:
        """Discard the blocks that the failed step `step_id` or a later one should have stored."""
        for host in [host for host in self._blocks.values() if host.step_id >= step_id]:
            self.discard(host.key)

    def take_copies(self, step_id: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the copies of this step's plan: (device, host) ids to the host, (host, device) ids back."""
        stores = [(device_id, host.host_id) for host, device_id in self._stores.items()]
        for host in self._stores:
            host.step_id = step_id
        loads, self._loads = self._loads, []
        self._stores.clear()
        self._in_use.clear()
        self._free += self._discarded
        self._discarded.clear()
        return stores, loads

    def check_integrity(self, own_keys: Set[Hashable]) -> None:
        """Check that each host block is free, or found by exactly one key: a hash, or one of `own_keys`."""
        host_ids = sorted([*(host.host_id for host in self._blocks.values()), *self._free, *self._discarded])
        assert host_ids == list(range(self.capacity)), f"host blocks lost or duplicated: {host_ids}"
        assert all(host.key == key for key, host in self._blocks.items())
        assert all(isinstance(key, bytes) or key in own_keys for key in self._blocks), "blocks of no sequence"
        assert all(
            self._blocks.get(host.key) is host or host.host_id in self._discarded for host in self._stores
        )

    def _take(self) -> int | None:
        """Return a free host id, evicting the least recently used block if needed; None if all are in use."""
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._blocks.values()), None)
        if oldest is None or oldest in self._in_use:
            return None
        del self._blocks[oldest.key]
        self.evictions += 1
        return oldest.host_id
