"""Host memory for the KV of preempted sequences: maps table entries to host blocks.

A swapped sequence holds no device block of its own. Blocks that others also hold stay in place, and it keeps
its reference to them; the rest is copied to host blocks. Sequences swapped out together share host blocks as
they shared device blocks.

The copies travel in a plan, which applies them before any other write: first those out, then those in. So a
device block may be given to another sequence in the very step that copies it out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass

from pagemill.engine.scheduling.blocks import HostBlock, KVBlock
from pagemill.engine.scheduling.kv.block_groups import BlockGroups
from pagemill.engine.scheduling.kv.block_pool import NULL_BLOCK_ID, BlockPool
from pagemill.engine.scheduling.request import Sequence


@dataclass(frozen=True, slots=True)
class SwapQuote:
    """The data that swapping some sequences out would move: the blocks that only they hold."""

    num_blocks: int
    num_tokens: int
    """Tokens whose KV is in them, which would otherwise have to be recomputed."""


def kept_blocks(sequence: Sequence) -> list[KVBlock]:
    """Return the device blocks that a swapped sequence still refers to."""
    entries = sequence.swapped_blocks
    return [entry for entry in entries if isinstance(entry, KVBlock) and entry.block_id != NULL_BLOCK_ID]


class SwapSpace:
    """Moves whole tables between a `BlockPool` and host memory."""

    def __init__(self, pool: BlockPool, num_host_blocks: int, groups: BlockGroups) -> None:
        self.capacity = num_host_blocks
        self.swapped_out = 0
        self.swapped_in = 0
        self._pool = pool
        self._groups = groups
        self._block_size = groups.block_size
        self._free = list(range(num_host_blocks - 1, -1, -1))
        self._read: list[int] = []
        """Host ids that become free once the plan that reads them is made."""
        self._outgoing: dict[HostBlock, int] = {}
        """Host block -> the device block that the next plan copies to it."""
        self._incoming: list[tuple[int, int]] = []
        """(host, device) ids that the next plan copies back."""
        self._leaving: list[Sequence] = []
        """Sequences whose copies out are not in a plan yet."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def outgoing_blocks(self) -> list[int]:
        """Device blocks that the next plan copies out; they may already be free."""
        return list(self._outgoing.values())

    def quote(self, sequences: SequenceType[Sequence]) -> SwapQuote:
        """Return what `swap_out` would move; it needs as many free host blocks."""
        blocks = self._own_blocks(sequences)
        num_tokens = [0] * self._groups.num_groups
        for block in blocks:
            num_tokens[block.group] += block.num_filled
        return SwapQuote(len(blocks), max(num_tokens))

    def swap_out(self, sequences: SequenceType[Sequence]) -> None:
        """Take the device blocks of these running sequences, together."""
        hosts: dict[KVBlock, HostBlock] = {}
        for block in self._own_blocks(sequences):
            host = hosts[block] = HostBlock(self._free.pop(), block.group)
            self._outgoing[host] = block.block_id
        self.swapped_out += len(hosts)
        for sequence in sequences:
            table = [self._pool.blocks[block_id] for block_id in sequence.block_ids]
            sequence.block_ids = []
            sequence.swapped_blocks = [hosts.get(block, block) for block in table]
            for entry in sequence.swapped_blocks:
                if isinstance(entry, HostBlock):
                    entry.ref_count += 1
            moved = [block for block in reversed(table) if block in hosts]
            self._pool.release(moved, sequence.last_step_id)
            self._leaving.append(sequence)

    def num_blocks_taken(self, sequences: SequenceType[Sequence]) -> int:
        """Return the number of available device blocks that `swap_in` would take."""
        found = self._find_cached(sequences)
        idle = {block for block in found.values() if block.ref_count == 0 and not block.is_reserved}
        return len(self._host_blocks(sequences)) - len(found) + len(idle)

    def swap_in(self, sequences: SequenceType[Sequence]) -> None:
        """Give these sequences device blocks again, from the prefix cache where it still has them.

        The caller has checked that the pool has enough. At least one token is left to compute, for its
        logits.
        """
        devices = self._find_cached(sequences)
        for block in devices.values():
            self._pool.acquire(block)
        for host in self._host_blocks(sequences):
            if host not in devices:
                devices[host] = self._pool.allocate(1, host.group)[0]
                self._incoming.append((host.host_id, devices[host].block_id))
                self.swapped_in += 1
        is_held: set[HostBlock] = set()
        for sequence in sequences:
            for index, entry in enumerate(sequence.swapped_blocks):
                if isinstance(entry, KVBlock):
                    sequence.block_ids.append(entry.block_id)
                    continue
                device = devices[entry]
                if entry in is_held:
                    self._pool.acquire(device)
                is_held.add(entry)
                start = index // self._groups.num_groups * self._block_size
                num_filled = min(self._block_size, sequence.num_computed_tokens - start)
                self._pool.fill(device, max(device.num_filled, num_filled))
                sequence.block_ids.append(device.block_id)
                self._release_host(entry, self._read)
            sequence.swapped_blocks = []
            sequence.num_registered_blocks = 0
            sequence.num_computed_tokens = min(sequence.num_computed_tokens, sequence.num_known_tokens - 1)

    def drop(self, sequence: Sequence) -> None:
        """Release all that a swapped sequence holds, here and on the device."""
        self._pool.release(reversed(kept_blocks(sequence)), sequence.last_step_id)
        for entry in sequence.swapped_blocks:
            if isinstance(entry, HostBlock):
                self._release_host(entry, self._free)
                if not entry.ref_count:
                    self._outgoing.pop(entry, None)
        sequence.swapped_blocks = []
        sequence.num_computed_tokens = sequence.num_registered_blocks = 0

    def take_copies(self, step_id: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the copies for this step's plan: (device, host) ids out, (host, device) ids in."""
        out = [(device_id, host.host_id) for host, device_id in self._outgoing.items()]
        incoming, self._incoming = self._incoming, []
        self._outgoing.clear()
        self._free += self._read
        self._read.clear()
        for sequence in self._leaving:
            sequence.last_step_id = step_id
        self._leaving.clear()
        return out, incoming

    def check_integrity(self, swapped: SequenceType[Sequence]) -> None:
        """Check that host blocks are free or in tables, with correct counts."""
        references = self._host_blocks(swapped)
        for host, count in references.items():
            assert host.ref_count == count, f"host block {host.host_id} stands in {count} tables"
        host_ids = sorted([*(host.host_id for host in references), *self._free, *self._read])
        assert host_ids == list(range(self.capacity)), f"host blocks lost or doubled: {host_ids}"
        for sequence in swapped:
            needed = self._groups.columns(sequence.num_computed_tokens) * self._groups.num_groups
            assert len(sequence.swapped_blocks) == needed, (
                f"{needed} blocks, {len(sequence.swapped_blocks)} kept"
            )

    def _own_blocks(self, sequences: SequenceType[Sequence]) -> list[KVBlock]:
        """Return the blocks that only these sequences hold."""
        references = Counter(block_id for sequence in sequences for block_id in sequence.block_ids)
        blocks = self._pool.blocks
        return [
            blocks[block_id] for block_id, count in references.items() if blocks[block_id].ref_count == count
        ]

    def _find_cached(self, sequences: SequenceType[Sequence]) -> dict[HostBlock, KVBlock]:
        """Map full host blocks to their findable twins on the device, except the block of the next write."""
        found = {}
        count = self._groups.num_groups
        for sequence in sequences:
            num_full = min(sequence.num_computed_tokens, sequence.num_known_tokens - 1) // self._block_size
            hashes = sequence.block_hashes[:num_full]
            for index, entry in enumerate(sequence.swapped_blocks[: len(hashes) * count]):
                key = self._groups.key(hashes[index // count], index % count)
                if isinstance(entry, HostBlock) and (block := self._pool.lookup(key)) is not None:
                    found[entry] = block
        return found

    @staticmethod
    def _host_blocks(sequences: SequenceType[Sequence]) -> Counter[HostBlock]:
        """Count, per host block, these tables that contain it."""
        return Counter(b for s in sequences for b in s.swapped_blocks if isinstance(b, HostBlock))

    @staticmethod
    def _release_host(host: HostBlock, freed: list[int]) -> None:
        host.ref_count -= 1
        if not host.ref_count:
            freed.append(host.host_id)
