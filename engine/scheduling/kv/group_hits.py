"""Prefix hits where layers have windows: a prefix is found if every group of layers can continue from its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagemill.engine.scheduling.blocks import HostBlock, KVBlock
from pagemill.engine.scheduling.kv.block_groups import BlockGroups

Entry = KVBlock | HostBlock
Lookup = Callable[[bytes], Entry | None]


def match_groups(lookup: Lookup, groups: BlockGroups, hashes: Sequence[bytes], null: KVBlock) -> list[Entry]:
    """Return the table of the longest prefix found, with the null block where nothing will be read.

    Args:
        lookup: returns the block with a key.
        hashes: hashes of the candidate columns, in order.
    """
    # Groups without a window end the search at the first missing column.
    order = sorted(range(groups.num_groups), key=lambda group: groups.windows[group] is not None)
    length, before = len(hashes), -1
    while length != before:
        before = length
        for group in order:
            length = _longest(lookup, groups, group, hashes[:length])
    first = [groups.first_read(window, length * groups.block_size) for window in groups.windows]
    table: list[Entry] = []
    for column in range(length):
        for group in range(groups.num_groups):
            block = lookup(groups.key(hashes[column], group)) if column >= first[group] else None
            table.append(block or null)
    return table


def _longest(lookup: Lookup, groups: BlockGroups, group: int, hashes: Sequence[bytes]) -> int:
    """Return the largest number of columns after which a group has all blocks that the next token reads."""
    window, end = groups.windows[group], len(hashes)
    if window is None:
        missing = (column for column, key in enumerate(hashes) if lookup(groups.key(key, group)) is None)
        return next(missing, end)
    column = end
    while column > groups.first_read(window, end * groups.block_size):
        column -= 1
        if lookup(groups.key(hashes[column], group)) is None:
            end = column
    return end
